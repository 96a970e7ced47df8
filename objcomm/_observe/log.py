"""The only logger, ``objcomm``, whose records include the rank that wrote them.

Like any logger that is not configured, it prints warnings to standard error and nothing else.
"""

import contextlib
import logging
import os
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch.distributed as dist

from objcomm._environment import unjoined_in


class _Ranked(logging.LoggerAdapter[logging.Logger]):
    """Adds ``rank`` and ``world_size`` of this process, and ``group``, to each record.

    Before the process group is initialized, rank and size come from the launcher's environment
    variables, as in ``objcomm.rank``. ``group`` is the name of the group concerned, as in
    ``objcomm.recorder.dump``; empty if there is none.
    """

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """See ``logging.LoggerAdapter``; exceptions of the program's filters are suppressed."""
        with contextlib.suppress(Exception):  # the logging thread may be the watchdog
            super().log(level, msg, *args, stacklevel=2, **kwargs)

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """See ``logging.LoggerAdapter``."""
        if dist.is_available() and dist.is_initialized():
            rank, world_size = dist.get_rank(), dist.get_world_size()
        else:
            rank, world_size, _ = unjoined_in(os.environ)
        own = {"rank": rank, "world_size": world_size, "group": ""}
        return msg, {**kwargs, "extra": own | (kwargs.get("extra") or {})}


log = _Ranked(logging.getLogger("objcomm"))


@contextlib.contextmanager
def logged(failed: str) -> Iterator[None]:
    """Log and suppress exceptions in a block, for a thread that must keep running.

    Args:
        failed: the log message, which says what an exception means.
    """
    try:
        yield
    except Exception:
        log.exception(failed)
