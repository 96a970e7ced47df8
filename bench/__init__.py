"""Benchmarks: objcomm beside what else could do the job, in one run.

``python -m bench OPERATION --world N`` measures, ``python -m bench report`` writes the page.
Suites declare cases, peers give every library one signature, ``timing`` and ``memory`` measure,
``report`` renders. A case never loops and never reads a clock.
"""
