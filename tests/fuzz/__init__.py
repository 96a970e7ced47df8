"""Fuzz everything that reads received bytes: bad ones raise an objcomm error, and do nothing else.

``python -m tests.fuzz --messages 10000000`` mutates objcomm's own messages from a seed; ``python -m
tests.fuzz.run_atheris plain`` runs a coverage-guided fuzzer. Interesting inputs are kept in
``corpus/``, one folder for each target, and the suite replays them.
"""
