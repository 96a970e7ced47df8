"""What ``python -m objcomm inspect`` does: lay the ranks' dumps side by side.

Reads files that ``objcomm.recorder`` wrote, and knows nothing of torch, groups or traffic, so it
runs anywhere and on any number of ranks.
"""
