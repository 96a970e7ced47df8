"""``python -m objcomm inspect``: the records of all ranks, laid side by side after the job.

Knows files, which may come from anywhere; needs no group and no other rank.
"""
