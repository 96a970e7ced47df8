"""Moves messages and tensors between ranks; the only callers of torch's communication.

``base`` says what a link is, ``gloo`` and ``nccl`` are links, ``rendezvous`` makes ranks meet,
``watch`` ends a wait on Ctrl-C, ``topology`` says who forwards to whom, ``exchange`` is one
operation's traffic, ``routes`` the patterns of traffic. None knows objects or codecs.
"""
