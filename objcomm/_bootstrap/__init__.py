"""Start ranks, or join those that a launcher has started.

Other packages take over when the group is connected. ``doctor`` examines hosts and networks before
there is a job.
"""
