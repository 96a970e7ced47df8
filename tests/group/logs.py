"""The log records of objcomm, collected by a handler of its logger."""

import contextlib
import logging
from collections.abc import Iterator

import torch.distributed as dist


class Collecting(logging.Handler):
    """Keeps the records it receives.

    Attributes:
        records: all of them.
        told: their messages, in the same order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        self.records.append(record)
        self.told.append(record.getMessage())

    def texts(self, level: int) -> list[str]:
        """Messages about the world's group; groups of other tests may still be ending."""
        world = (dist.group.WORLD or dist.ProcessGroup).group_name
        found = [each for each in self.records if vars(each)["group"] == world]
        return [each.getMessage() for each in found if each.levelno == level]


@contextlib.contextmanager
def collected(level: int = logging.DEBUG) -> Iterator[Collecting]:
    """A block in which records of this level or above go to a handler, and nowhere else."""
    handler, logger = Collecting(), logging.getLogger("objcomm")
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    was_disabled, logger.disabled = logger.disabled, False
    try:
        yield handler
    finally:
        logger.disabled = was_disabled
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
        logger.propagate = True
