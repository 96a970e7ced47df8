"""``python -m objcomm inspect``: compare the recorded calls of all ranks after the job.

This package reads files, which may come from untrusted sources. It does not need a group or other
ranks.
"""
