"""Programs that do not know about objcomm, for ``test_run_libraries``.

Each trains or measures with a library, on any number of ranks, and writes two lines on each rank:
the result, which must be the same with and without objcomm, and on standard error the milliseconds
that one round of its object collectives took.
"""
