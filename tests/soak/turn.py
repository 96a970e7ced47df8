"""One operation: what the plan says of it, and what each rank contributes."""

import random
import threading
from typing import Any, NamedTuple

from tests.group.helpers import RefusesToArrive
from tests.soak import payloads

MARK = "injected by the soak"


class InjectedError(Exception):
    """The error of callbacks that raise."""


class Subgroup(NamedTuple):
    """Global ranks that form a group; number 0 is the world."""

    number: int
    members: tuple[int, ...]


class Turn(NamedTuple):
    """One operation; ranks in it are group ranks.

    Attributes:
        seed: determines the contributions.
        codecs: one per rank.
        sizes: size of each rank's contribution, in bytes.
        fault: a key of ``faults.FAULTS``, or nothing.
        culprit: the rank whose part is faulty.
        victim: the rank that can't rebuild an object, for that fault.
    """

    operation: str
    group: Subgroup
    root: int
    seed: int
    codecs: tuple[str, ...]
    sizes: tuple[int, ...]
    confirm: bool = False
    fault: str = ""
    culprit: int = -1
    victim: int = -1

    @property
    def size(self) -> int:
        """Return the number of ranks in the group."""
        return len(self.group.members)

    @property
    def named_root(self) -> int:
        """Return what to pass as ``group_src=`` or ``group_dst=``."""
        return self.size if self.fault == "no such rank" else self.root

    def object_of(self, rank: int) -> Any:
        """Return a rank's contribution, including its fault."""
        obj = payloads.payload(self.seed * 64 + rank, self.sizes[rank])
        if rank != self.culprit:
            return obj
        if self.fault == "unencodable":
            return [obj, threading.Lock()]
        if self.fault == "undecodable":
            return [obj, RefusesToArrive(self.group.members[self.victim])]
        return obj

    def scalar_of(self, rank: int) -> Any:
        """Return a rank's contribution where scalars are required, including its fault."""
        if rank == self.culprit and self.fault == "no scalar":
            return [1]
        return payloads.scalar(self.seed * 64 + rank)

    def number_of(self, rank: int) -> int:
        """Return a rank's operand of a named operator; larger than any machine word."""
        return random.Random(self.seed * 64 + rank).randrange(-(2**70), 2**70)


class Party(NamedTuple):
    """This rank in the group of a turn."""

    rank: int
    group: Any


class Expected(NamedTuple):
    """The expected result of a turn on one rank.

    Attributes:
        value: the result, if there is one.
        error: the exact class of the error, if there is one.
        failed: the rank that a CollectiveError blames.
        text: part of the error's text.
    """

    value: Any = None
    error: type[Exception] | None = None
    failed: int = -1
    text: str = ""
