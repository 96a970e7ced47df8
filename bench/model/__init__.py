"""A model of many ranks: the package's routes over a link that only counts.

``python -m bench.model`` runs the actual functions of ``objcomm._algorithms.routes`` on more ranks
than any test machine has. Each rank is a thread, one thread runs at a time, and time is simulated.
``world`` implements this, ``link`` connects it to the routes, ``operations`` and
``torch_operations`` define what is run, ``real`` counts the same on real ranks, and ``page`` shows
both.
"""
