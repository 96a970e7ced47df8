"""A model of many ranks: the routes of the package, over a link that only counts.

``python -m bench.model`` runs the very functions of ``objcomm._algorithms.routes`` on as many ranks
as no test machine has. Each rank is a thread, one of them runs at a time, and time is a number.
``world`` keeps that, ``link`` offers it to the routes, ``operations`` and ``torch_operations`` say
what is run, ``real`` counts the same on real ranks, ``page`` shows both.
"""
