"""The operations that all ranks of a group call, each a function and its two steps.

Knows objects, and what a message means; which rank sends it to which is ``algorithms``' business.
"""
