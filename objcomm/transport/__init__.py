"""How ranks meet, and how bytes get from one to another; knows no objects, groups or verdicts.

``link`` says what a link is, ``gloo`` is one, ``rendezvous`` makes ranks meet in a ``store``,
``lane`` has receives that stand ready; ``sockets`` and ``threads`` are what the others need of the
system.
"""
