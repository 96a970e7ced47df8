"""Programs that know nothing of objcomm, for ``test_run_libraries``.

Each trains or measures with a library, on any number of ranks, and writes two lines on each rank:
what came out, which must be the same with and without objcomm, and on standard error the
milliseconds that one round of its object collectives took.
"""
