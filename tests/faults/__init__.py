"""Faults, each tried on every operation: ranks that die, stop, close their sockets or go astray.

``plan`` says what is tried, ``strike`` does it to the rank that is the victim, ``torchs`` are torch's
own object collectives for comparison, ``run`` carries one case out on real processes, and
``python -m tests.faults`` writes what each rank saw into the guide.
"""
