"""Which rank sends what to which, in which pieces and in which order.

This package knows ranks within a group, links and messages. It knows neither objects nor the
purpose of a transfer.
"""
