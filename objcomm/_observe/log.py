"""The one logger, ``objcomm``, whose records say which rank wrote them.

As any logger that nobody configures, it shows warnings on standard error, and nothing else.
"""

import contextlib
import logging
import os
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch.distributed as dist

from objcomm._environment import unjoined_in


class _Ranked(logging.LoggerAdapter[logging.Logger]):
    """Gives each record ``rank`` and ``world_size`` of this process, and ``group``.

    Before the ranks have joined, a launcher's variables tell, as with ``objcomm.rank``. ``group``
    is the name of the group concerned, as in ``objcomm.recorder.dump``; empty if it is none.
    """

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """See ``logging.LoggerAdapter``; what a filter of the program's raises goes no further."""
        with contextlib.suppress(Exception):  # the thread that logs may be all ranks' watchdog
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
    """A block whose errors are logged and go no further, in a thread that must go on.

    Args:
        failed: what an error in it means.
    """
    try:
        yield
    except Exception:
        log.exception(failed)
