"""The operations that all ranks of a group call. Each is a function and its two steps.

This package knows objects and the meaning of messages. ``algorithms`` decides which rank sends a
message to which.
"""
