"""Who sends what to whom, in which pieces and which order.

Knows ranks within a group, links and messages; knows nothing of objects, or of what is sent for.
"""
