"""Groups, and calls on them, from checking the arguments to the result or error.

This package knows about ranks, options and timeouts. It knows operations only by name.
"""
