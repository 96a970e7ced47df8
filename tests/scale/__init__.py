"""Tens of ranks on one machine, as one host or many: results, costs, and which ranks notice faults.

``python -m tests.scale 16 4`` runs 16 hosts of 4 ranks, and prints the results.
"""
