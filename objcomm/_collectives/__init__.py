"""The operations that all ranks of a group call. Most run in two steps: encode, then communicate.

This package knows objects and the meaning of messages. ``_algorithms`` decides which rank sends a
message to which.
"""
