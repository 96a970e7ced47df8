"""A group as objcomm sees it, and one call on it, from its arguments to its result or error.

Knows ranks, options and time limits; which operation it is, only by name.
"""
