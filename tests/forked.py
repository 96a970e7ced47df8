"""The fork server that starts all of the suite's processes, at some 10 ms each.

multiprocessing has one per process, which imports what is configured before its first child.
"""

import multiprocessing

# What a child need not import again; importing objcomm only runs definitions.
_IMPORTED = ["torch", "torch.distributed", "numpy", "objcomm"]
# After the module that makes their asserts show their values.
_EXPLAINED = ["tests.explained", "tests.workers", "tests.faults.rank"]

#: A process that has ended with an unknown status (CPython's ``popen_forkserver.Popen.poll``). Seen
#: once in some thousand cases, with a rank that had completed all its work.
EXIT_UNKNOWN = 255

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(_IMPORTED + _EXPLAINED)
