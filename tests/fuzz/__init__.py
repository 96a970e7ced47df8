"""Fuzzing of all that reads received bytes: damaged or hostile ones give an objcomm error, no more.

``python -m tests.fuzz --messages 10000000`` mutates objcomm's own messages, as seeded;
``python -m tests.fuzz.run_atheris plain`` lets a coverage-guided fuzzer look for more. Inputs of
note are kept in ``corpus/``, one folder for each target, and the suite replays them.
"""
