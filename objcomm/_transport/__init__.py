"""Moves bytes between ranks; knows nothing of objects or verdicts.

``link`` defines what a link must do. There are two implementations, ``streams`` and ``gloo``; other
modules do not know which one they use. A stream link is built from ``frames`` (the frame format),
``peer`` (the protocol with one rank, without a socket), ``pending`` (what threads wait for),
``event_loop`` (how they wait), ``connection`` (the sockets to one rank) and ``calling``
(connections made on first use).

In ``rendezvous``, ranks meet through a store. ``doors`` says where each rank listens, and
``connect`` connects them. ``store`` and ``sockets`` watch the connections, ``lane`` keeps calls in
order, and ``threads`` runs them.
"""
