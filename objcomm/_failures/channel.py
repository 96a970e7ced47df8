"""Channels: a channel connects some ranks of a group for the group's whole life.

It admits one call at a time to each lane, and creates a new mesh after a recoverable verdict. A
group has one channel for all of its ranks, and one for each pair of ranks that exchanges
point-to-point messages. A pair connects without waiting for other ranks, and a failure of its
connections does not affect those of other ranks.
"""

from __future__ import annotations  # torch may be built without distributed

import contextlib
import functools
import sys
import threading
from typing import TYPE_CHECKING

from objcomm._failures import unmatched_calls
from objcomm._failures.losses import end_unconnected
from objcomm._failures.mesh import Mesh
from objcomm._failures.noticeboard import Board, StoreSilentError
from objcomm._failures.verdict import DESTROYED, Verdict
from objcomm._failures.watchdog import (
    FAREWELL_SECONDS,
    board_thread_of,
    compare_destroyed,
    end_elsewhere,
    watch,
)
from objcomm._observe.log import logged
from objcomm._transport.lane import IN_TURNS, Lane
from objcomm._transport.link import LANE_BITS, Deadline
from objcomm._transport.threads import Alone
from objcomm._wire.header import fingerprint
from objcomm._world import is_alive, store_of
from objcomm.errors import BrokenGroupError, ObjcommError, UsageError, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch.distributed as dist

    from objcomm._observe.history import CallRecord, History
    from objcomm._transport.threads import TicketQueue


class Channel:
    """A succession of meshes between the same ranks; see the module docstring. Thread-safe.

    Attributes:
        members: the ranks that it connects, as group ranks.
        global_ranks: the same ranks, as global ranks.
    """

    def __init__(
        self,
        *,
        name: str,
        process_group: Callable[[], dist.ProcessGroup],
        world: Callable[[], dist.ProcessGroup],
        ranks: tuple[int, ...],
        rank: int,
        members: tuple[int, ...],
        history: History,
        whole: Channel | None,
    ) -> None:
        """Create a channel without a mesh.

        Args:
            name: the name of the group, or of the list of ranks; the same on each of them.
            process_group: returns the user's group; raises UsageError once it is destroyed.
            world: returns the group of all ranks.
            ranks: the group's global ranks.
            rank: this process's group rank.
            members: the ranks to connect, as group ranks.
            history: the group's calls on this rank.
            whole: the channel of the whole group, if this one connects a pair.
        """
        self.members = members
        self.global_ranks = tuple(ranks[member] for member in members)
        self._name = name
        self._process_group = process_group
        self._world = world
        self._ranks = ranks
        self._rank = rank
        self._history = history
        self._whole = whole
        self._lock = threading.RLock()
        self._change = Alone("a call of this group")
        self._mesh: Mesh | None = None
        # Replaced meshes whose verdict some thread has yet to raise.
        self._owed: list[Mesh] = []

    def join(self, operation: str, deadline: Deadline, call_site: str) -> None:
        """Connect now instead of in the first call; every member must call this.

        Does what ``admit`` and ``connect`` do, with their errors, but leaves no lane taken.
        """
        mesh, lane = self.admit(operation, "")
        if mesh.link is None:
            self.connect(mesh, lane, operation, deadline, call_site)
        with self._lock:
            if mesh.lanes.get(lane.name) is lane:
                del mesh.lanes[lane.name]

    def admit(
        self,
        operation: str,
        lane_name: str,
        order: TicketQueue | None = None,
        *,
        raises_later: bool = False,
    ) -> tuple[Mesh, Lane]:
        """Return the mesh for a call, which ``connect`` may still have to connect, and its lane.

        Args:
            operation: the operation, for error messages.
            lane_name: the name of the calling thread's lane.
            order: given if any thread may use the lane.
            raises_later: whether a verdict that the thread has yet to raise is left to the call's
                ``Work``, or to the next call.

        Returns:
            A mesh and a lane. With ``raises_later``, this may be a mesh that has ended and whose
            verdict the thread has yet to raise: another rank may have begun the matching call
            before the verdict.

        Raises:
            BrokenGroupError: an earlier error has closed the connections for good.
            ObjcommError: the connections have been closed since this thread's last call. Its next
                call is admitted.
            UsageError: the group is destroyed, another thread owns the lane, or this thread is
                inside another call on it, for example in a callback.
        """
        mesh = self._mesh
        if mesh is None or mesh.verdict is not None or self._owed:
            if mesh is not None:  # the mesh may have ended while a call on it has not
                _refuse_inside(operation, mesh.lanes.get(lane_name))
            mesh = self._settled(operation, raises_later=raises_later)
        lane = mesh.lanes.get(lane_name)
        if order is not None:
            return mesh, lane or self._taken(operation, mesh, lane_name, order)
        # A lane without a call in progress need not be checked.
        if lane is None or lane.begun_at or lane.entry is not None or lane.line is not None:
            _refuse_inside(operation, lane)
        if lane is None or lane.owner is not threading.current_thread():
            lane = self._taken(operation, mesh, lane_name)
        return mesh, lane

    def connect(
        self,
        mesh: Mesh,
        lane: Lane,
        operation: str,
        deadline: Deadline,
        call_site: str,
        *,
        caller: CallRecord | None = None,
    ) -> None:
        """Wait until every member has joined and ``mesh`` is connected; see ``Mesh.connect``."""
        try:
            mesh.connect(self.store(), deadline, lane, operation, call_site, caller=caller)
        except ObjcommError:
            if mesh.verdict is not None:
                end_elsewhere(mesh.verdict)
            raise

    @property
    def mesh(self) -> Mesh | None:
        """The mesh in use, or the last one; None before the first."""
        return self._mesh

    @property
    def is_busy(self) -> bool:
        """Whether a call is in progress on it."""
        mesh = self._mesh
        return mesh is not None and any(lane.is_busy for lane in tuple(mesh.lanes.values()))

    def retire(self) -> None:
        """Close the connections after this process has destroyed the group.

        If the world is destroyed, too, this waits while the calls on all destroyed groups are
        compared: the store goes with the world.
        """
        mesh = self._mesh
        if mesh is None or unmatched_calls.failure_here() is not None:  # report only that
            return
        with logged("could not check whether all ranks made the same calls"):
            try:
                if _is_destroyed(self._world):
                    compare_destroyed()
                elif (comparison := unmatched_calls.comparison(mesh)) is not None:
                    mesh.board_thread.submit(
                        functools.partial(unmatched_calls.publish_and_compare, [comparison])
                    )
            finally:  # Ctrl-C may end the wait
                unmatched_calls.close_and_check(mesh, DESTROYED)

    @property
    def is_broken(self) -> bool:
        """Whether it is closed for good."""
        mesh = self._mesh
        return mesh is not None and mesh.verdict is not None and not mesh.can_be_replaced

    def mark_raised(self, verdict: Verdict) -> None:
        """End the connections with a verdict that the calling thread raises elsewhere.

        It also covers earlier verdicts that the calling thread has not raised yet: on every rank,
        this verdict is the last one that the thread raises before it continues. Other threads raise
        what ended the connections in their next calls, as they do on the other ranks.
        """
        mesh = self._mesh
        if mesh is None or (mesh.verdict is None and self._is_clear_of(mesh, verdict)):
            return
        mesh.settle(verdict)
        if not mesh.can_be_replaced:
            return
        with self._lock:
            for each in [*self._owed, mesh]:
                each.mark_raised(threading.current_thread())

    def _is_clear_of(self, mesh: Mesh, verdict: Verdict) -> bool:
        """Whether the other rank of a pair may have joined ``mesh`` after it raised ``verdict``."""
        return self._whole is not None and (mesh.link is None or mesh.outlives == verdict.name)

    def store(self) -> dist.Store:
        """Return the store of the world."""
        store: dist.Store = store_of(self._world())
        return store

    @property
    def _pair(self) -> str:
        return "-".join(map(str, self.members))

    def _settled(self, operation: str, *, raises_later: bool) -> Mesh:
        """Raise a verdict that this thread still owes, or return a mesh that has not ended."""
        thread = threading.current_thread()
        with self._lock, self._change:
            self._owed = [each for each in self._owed if each.is_owed]
            for each in [*self._owed, self._mesh]:
                if each is None or each.verdict is None or not each.is_owed_by(thread):
                    continue
                if raises_later and each.link is not None:
                    return each
                each.mark_raised(thread)
                end_elsewhere(each.verdict)
                raise each.verdict.error(operation, each.last_position(thread))
            mesh = self._mesh
            if mesh is None or mesh.verdict is not None:
                mesh = self._mesh = self._renewed(operation, mesh)
            return mesh

    def _renewed(self, operation: str, ended: Mesh | None) -> Mesh:
        """Create a mesh to replace one that has ended."""
        if ended is not None and ended.verdict is not None:
            # The other ranks may have agreed on another verdict: wait for the job that reads it.
            if ended.verdict.is_store_silent:
                with contextlib.suppress(StoreSilentError):
                    ended.board_thread.call(lambda _: None)
            if not ended.can_be_replaced:
                raise BrokenGroupError(operation, text_of(ended.verdict.error("an earlier call")))
            if ended.is_owed:
                self._owed.append(ended)
        group, is_whole = self._process_group(), self._whole is None
        is_world = is_whole and group is self._world() and self._name == group.group_name
        mesh = Mesh(
            name=self._name if is_whole else f"{self._name}, ranks {self._pair}",
            is_world=is_world,
            ranks=self._ranks,
            rank=self._rank,
            history=self._history,
            board_thread=board_thread_of(self._world()),
            members=self.members,
            # Must not hold ``self``, which holds the mesh: a cycle would keep connections open.
            whole=None if self._whole is None else functools.partial(_mesh_of, self._whole),
            is_destroyed=functools.partial(_is_destroyed, self._process_group),
            end_unconnected=end_unconnected,
        )
        if ended is not None and ended.link is None:
            mesh.failed_meeting = ended.nonce
        watch(mesh)
        return mesh

    def _taken(
        self, operation: str, mesh: Mesh, name: str, order: TicketQueue | None = None
    ) -> Lane:
        """Return the lane of that name, now owned by the calling thread."""
        thread = threading.current_thread()
        with self._lock, self._change:
            lane = mesh.lanes.get(name) or self._new_lane(mesh, name, thread, order)
            is_taken = lane.owner is not thread and lane.owner.is_alive()
            if order is None and is_taken and name != IN_TURNS:
                which = f"lane {name!r} of this group" if name else "this group"
                raise UsageError(
                    f"{operation}: thread {lane.owner.name!r} already uses {which}; give "
                    f"{thread.name!r} its own lane: with objcomm.lane('…'):"
                )
            lane.owner = thread
            return lane

    def _new_lane(
        self, mesh: Mesh, name: str, thread: threading.Thread, order: TicketQueue | None
    ) -> Lane:
        number = fingerprint(name) % (1 << LANE_BITS)
        for other in tuple(mesh.lanes.values()):
            if other.number == number:
                raise UsageError(f"lanes {other.name!r} and {name!r} collide; rename one of them")
        mesh.lanes[name] = Lane(name, number, thread, order)
        return mesh.lanes[name]


def _refuse_inside(operation: str, lane: Lane | None) -> None:
    """Refuse a call by a thread that is inside another call on the same lane.

    Raises:
        UsageError: the thread is inside such a call.
    """
    caller = "" if lane is None else lane.caller
    if lane is not None and caller and lane.entry is None and not _is_inside():
        lane.begun_at = caller = ""  # Ctrl-C came before the call's block was entered
    if caller:
        raise UsageError(
            f"{operation}: a callback of {caller}, or a signal's handler or a destructor that has "
            "interrupted it, cannot use this group until that call has returned; communicate "
            "before or after it"
        )


def _is_inside() -> bool:
    """Whether the code that calls objcomm here was itself called by objcomm."""
    frame, has_left = sys._getframe(), False  # noqa: SLF001  # documented by CPython
    while frame.f_back is not None:
        frame = frame.f_back
        module = frame.f_globals.get("__name__", "")
        is_own = module.startswith("objcomm._") and not module.startswith("objcomm._bootstrap")
        if is_own and has_left:
            return True
        has_left |= not is_own
    return False


def say_farewell(channels: Iterable[Channel]) -> None:
    """End the connections of a garbage-collected group, and post the reason for other ranks."""
    verdicts: dict[Mesh, Verdict] = {}
    for channel in channels:
        mesh = channel.mesh
        if mesh is not None and mesh.verdict is None:
            verdicts[mesh] = mesh.destroyed()

    def post(board: Board) -> None:
        for mesh, verdict in verdicts.items():
            if mesh.link is not None and mesh.verdict is None:
                mesh.stop(board.propose(mesh.nonce, verdict), board)

    # One job for all: if the world is gone as well, the board's thread runs no second job.
    for board_thread in {mesh.board_thread for mesh in verdicts}:
        with contextlib.suppress(StoreSilentError):
            board_thread.call(post, FAREWELL_SECONDS)  # another job may keep it busy for 1.2 s
    for mesh, verdict in verdicts.items():
        mesh.stop(verdict._replace(is_store_silent=True))


def _is_destroyed(process_group: Callable[[], dist.ProcessGroup]) -> bool:
    try:
        return not is_alive(process_group())
    except UsageError:
        return True


def _mesh_of(channel: Channel) -> Mesh | None:
    return channel.mesh
