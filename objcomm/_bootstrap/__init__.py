"""Start ranks, or join those that a launcher has started.

Ends when the group is connected. ``doctor`` examines hosts and networks before there is a job.
"""
