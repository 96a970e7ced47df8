"""No wait is a silent one: who is alive, who waits for whom, and why connections ended.

Knows processes, connections and the store; nothing of the objects that a call moves.
"""
