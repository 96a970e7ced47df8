"""The operations that all ranks of a group call, each built from ``patterns``.

Knows objects, and what a message means; which rank sends it to which is ``algorithms``' business.
"""
