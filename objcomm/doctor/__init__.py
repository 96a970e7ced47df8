"""What ``python -m objcomm doctor`` does: say why ranks would not meet, or would be slow.

Each rank tells what it finds on its host; the ranks meet in a store, try to reach one another, and
measure the links between them; rank 0 draws conclusions and reports.
"""
