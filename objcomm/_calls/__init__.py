"""Groups, and calls on them from the checking of arguments to the result or error.

This package knows about ranks, options and timeouts. It knows operations only by name.
"""
