"""``python -m objcomm top``: show what the ranks of a running job are doing."""
