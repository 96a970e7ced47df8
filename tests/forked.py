"""The fork server that all of the suite's processes come from: each costs some 10 ms.

multiprocessing has one in a process, which imports what it was told before its first child.
"""

import multiprocessing

# What a child need not import again; objcomm only defines when it is imported.
_IMPORTED = ["torch", "torch.distributed", "numpy", "objcomm"]
# After what makes their asserts show their values.
_EXPLAINED = ["tests.explained", "tests.workers", "tests.faults.rank"]

#: A process that has ended, but how was not told (CPython's ``popen_forkserver.Popen.poll``). Seen
#: once in some thousand cases, with a rank that had done all it was asked for.
EXIT_UNKNOWN = 255

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(_IMPORTED + _EXPLAINED)
