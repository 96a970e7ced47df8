"""Benchmarks that compare objcomm with its alternatives in one run.

``python -m bench OPERATION --world N`` measures, ``python -m bench report`` writes the page.
Suites declare cases, peers give all libraries the same methods, ``measure`` and ``memory`` measure,
and ``report`` renders. A case never loops and never reads a clock.
"""
