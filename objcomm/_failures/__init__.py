"""Failure detection: which ranks are alive, which rank waits for which, why connections ended.

This package knows about processes, connections and the store, but not about the objects that a
call moves. Its purpose is that no call ever hangs silently.
"""
