"""Bytes from rank to rank; no objects, no verdicts.

``link`` says what a link must do, and each kind of link is one module, ``streams`` and ``gloo``;
all others do not know which one they have. ``rendezvous`` makes ranks meet in a store, ``doors``
says where they find each other, ``connect`` joins them, ``store`` and ``sockets`` look after
connections, ``lane`` keeps calls in order, ``threads`` carry them out.
"""
