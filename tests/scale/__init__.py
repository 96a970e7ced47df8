"""Tens of ranks on one machine, on one host or on many: what works, what it costs, who hears what.

``python -m tests.scale 16 4`` runs 16 hosts of 4 ranks, and prints what was seen.
"""
