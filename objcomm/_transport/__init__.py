"""Bytes from rank to rank; no objects, no verdicts.

``link`` says what a link must do. There are two, ``streams`` and ``gloo``; other modules do not
know which one they have. A link over streams is made of ``frames`` (what travels), ``peer`` (the
protocol with one rank, without a socket), ``pending`` (what threads wait for), ``mover`` (how they
wait), ``connection`` (the sockets to one rank) and ``calling`` (connections that are made later).

``rendezvous`` makes ranks meet in a store, ``doors`` says where they find each other, ``connect``
joins them, ``store`` and ``sockets`` look after connections, ``lane`` keeps calls in order, and
``threads`` carry them out.
"""
