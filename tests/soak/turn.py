"""One operation of the plan: what stands in the plan, and what each rank then gives."""

import random
import threading
from typing import Any, NamedTuple

from tests.group.helpers import RefusesToArrive
from tests.soak import payloads

MARK = "injected by the soak"


class InjectedError(Exception):
    """What raising callbacks raise."""


class Subgroup(NamedTuple):
    """Some global ranks that make a group; number 0 is the world."""

    number: int
    members: tuple[int, ...]


class Turn(NamedTuple):
    """One operation; every rank in it means a rank within the group.

    Attributes:
        seed: what the contributions follow from.
        codecs: of each rank.
        sizes: of each rank's contribution, in bytes.
        fault: a key of ``faults.FAULTS``, or nothing.
        culprit: whose part is faulty.
        victim: which rank can't rebuild an object, where that is the fault.
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
        """Number of ranks that take part."""
        return len(self.group.members)

    @property
    def named_root(self) -> int:
        """What is passed as ``group_src=`` or ``group_dst=``."""
        return self.size if self.fault == "no such rank" else self.root

    def object_of(self, rank: int) -> Any:
        """What a rank contributes, its fault included."""
        obj = payloads.payload(self.seed * 64 + rank, self.sizes[rank])
        if rank != self.culprit:
            return obj
        if self.fault == "unencodable":
            return [obj, threading.Lock()]
        if self.fault == "undecodable":
            return [obj, RefusesToArrive(self.group.members[self.victim])]
        return obj

    def scalar_of(self, rank: int) -> Any:
        """What a rank contributes where scalars are asked for, its fault included."""
        if rank == self.culprit and self.fault == "no scalar":
            return [1]
        return payloads.scalar(self.seed * 64 + rank)

    def number_of(self, rank: int) -> int:
        """A rank's operand of a named operator; larger than any machine word."""
        return random.Random(self.seed * 64 + rank).randrange(-(2**70), 2**70)


class Party(NamedTuple):
    """This rank in the group of a turn."""

    rank: int
    group: Any


class Expected(NamedTuple):
    """What one rank gets of a turn.

    Attributes:
        value: the result, where there is one.
        error: the exact class of the error, where there is one.
        failed: the rank that a CollectiveError blames.
        text: what stands in the error.
    """

    value: Any = None
    error: type[Exception] | None = None
    failed: int = -1
    text: str = ""
