"""One point-to-point call on this rank: what a send and a receive have in common.

Its arguments, its entry in the history, and how it is concluded; what happens in between is the
business of ``sending`` and ``receiving``.
"""

import threading
import time
from types import TracebackType
from typing import Any, ClassVar, Self

from objcomm.absence import acts_alone
from objcomm.admission import Gate
from objcomm.coding import Coding
from objcomm.errors import UsageError
from objcomm.frames import Header, Operation
from objcomm.group import Timeout, whole_number
from objcomm.history import Entry, call_site
from objcomm.recorder import conclude
from objcomm.spans import Span, span
from objcomm.transport.base import FOREVER_SECONDS
from objcomm.transport.device import DevicePath
from objcomm.transport.exchange import Exchange
from objcomm.transport.lane import Lane
from objcomm.transport.mesh import Mesh
from objcomm.work import Work
from objcomm.world import GroupLike, resolve

_TAG_MAX = (1 << 32) - 1


class Errand:
    """See the module; constructing it checks the arguments and starts nothing.

    Entered as a context it is carried out there: it is noted before and concluded afterwards.

    Attributes:
        operation: SEND or RECV.
        group: where it takes place.
        entry: its record.
        peer: the other rank, within the group; None for any.
        tag: of the message; None for any.
    """

    operation: ClassVar[Operation]

    def __init__(
        self,
        *,
        group: GroupLike,
        timeout: Timeout,
        coding: Coding,
        tag: int | None,
        global_peer: int | None,
        group_peer: int | None,
        name: str = "",
    ) -> None:
        """Begin.

        Args:
            group: as the user gave it, like the next.
            timeout: in seconds.
            coding: encodes or decodes.
            tag: of the message; None for any.
            global_peer: the other rank as a global rank.
            group_peer: the same as a rank within the group; neither for any.
            name: of the user's call, where it is another.

        Raises:
            UsageError: an argument is wrong, or this rank is in a region where the others make no
                such call.
            NotInGroupError: this rank is no member.
        """
        self._began = time.perf_counter()
        self._name = name or self.operation.name.lower()
        self.group = resolve(group)
        self._coding = coding
        self._deadline = self.group.deadline(self._name, timeout)
        self.tag = None if tag is None else _tag(self._name, tag)
        self.peer: int | None = None
        if global_peer is not None or group_peer is not None:
            self.peer = self.group.root(self._name, global_peer, group_peer)
        acts_alone(self._name, self.group.ranks, self.group.rank)
        header = Header(
            operation=self.operation,
            sender=self.group.rank,
            root=-1 if self.peer is None else self.peer,
            tag=self.tag or 0,
            call_site=call_site(),
        )
        self.entry = Entry(header, self._name, coding.codec_name)
        self.entry.awaits = header.root
        # No limit at all (``inf``) is cut to one of 115 days: nobody polls so.
        self.entry.has_own_limit = timeout is not None and self._deadline.seconds < FOREVER_SECONDS
        self._exchange: Exchange | None = None
        self._own_error: BaseException | None = None
        self._span: Span | None = None
        self._has_begun = False
        self._claim = threading.Lock()

    def begin(self) -> None:
        """Note that the call is under way: nothing is wrong with its arguments."""
        if not self._has_begun:
            self._has_begun = True
            self.group.history.add(self.entry)

    def work(self) -> Work[Any]:
        """A work for what this errand gives."""
        return Work(self._name, self.entry.header.call_site, self.entry)

    def claim(self) -> bool:
        """Whether this thread is the one to conclude it, as the first that asks is.

        Where Ctrl-C comes while it is handed over to another thread, both have it.
        """
        return self._claim.acquire(blocking=False)

    def conclude(self, error: BaseException | None) -> None:
        """Note how it has ended."""
        self._own_error = None  # its traceback holds the caller's object
        conclude(self.group, self.entry, self._exchange, error, self._began)

    def __enter__(self) -> Self:
        self.begin()
        self._span = span(self._name)
        self._span.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._span is not None:
            self._span.__exit__(kind, error, traceback)
        self.conclude(error)

    def _joined(self, mesh: Mesh, lane: Lane, sequence: int) -> Exchange:
        """The traffic of the message of this number."""
        self.entry.header = self.entry.header._replace(
            lane=lane.number, group=mesh.number, sequence=sequence
        )
        self._exchange = Exchange(
            link=mesh.connections_for(self.entry.operation),
            lane=lane,
            entry=self.entry,
            deadline=self._deadline,
            gate=Gate(self._coding.settings, mesh.session, self.group.rank),
            device=DevicePath(None),
        )
        return self._exchange


def _tag(operation: str, tag: object) -> int:
    """A tag as a number.

    Raises:
        UsageError: it is none, or too large.
    """
    number = whole_number(tag)
    if number is not None and 0 <= number <= _TAG_MAX:
        return number
    raise UsageError(f"{operation}: tag={tag!r} is no integer from 0 to {_TAG_MAX}")
