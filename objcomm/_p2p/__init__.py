"""Point-to-point messages: ``send``, ``recv`` and related calls.

Only the two ranks of a message are needed; this package knows nothing of collectives.
"""
