"""Messages from one rank to another: ``send``, ``recv`` and what belongs to them.

Needs the two ranks only; knows nothing of the calls that all ranks of a group make together.
"""
