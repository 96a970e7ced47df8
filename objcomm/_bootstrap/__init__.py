"""How ranks come to be: they join what a launcher started, or are started here.

Ends where the group stands; ``doctor`` looks at hosts and networks before there is a job.
"""
