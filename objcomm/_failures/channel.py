"""What joins some ranks of one group for all of its life: one mesh after another.

Lets one call at a time in on each lane, and renews the mesh after a verdict that all ranks outlive.
A group has one channel for all of its ranks, and one for each pair that sends from rank to rank:
the two need nobody else to be there, and what ends their connections ends nobody else's.
"""

from __future__ import annotations  # torch may be built without distributed

import contextlib
import functools
import sys
import threading
from typing import TYPE_CHECKING

from objcomm._failures import audit
from objcomm._failures.losses import end_unconnected
from objcomm._failures.mesh import Mesh
from objcomm._failures.noticeboard import Board, StoreSilentError
from objcomm._failures.verdict import DESTROYED, Verdict
from objcomm._failures.watchdog import FAREWELL_SECONDS, board_thread_of, end_elsewhere, watch
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
    """See the module; every method may be called from any thread.

    Attributes:
        members: the ranks that it joins, as ranks within the group.
        global_ranks: the same as global ranks.
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
        """Begin.

        Args:
            name: the group's, or that of some of its ranks; the same on each of them.
            process_group: the user's group; raises UsageError once it was destroyed.
            world: the group of all ranks.
            ranks: the group's global ranks.
            rank: this process's rank within the group.
            members: the ranks to join, as ranks within the group.
            history: the group's calls on this rank.
            whole: what joins all of the group's ranks, if this joins two of them.
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
        # Those that were replaced while a thread had yet to raise what ended them.
        self._owed: list[Mesh] = []

    def join(self, operation: str, deadline: Deadline, call_site: str) -> None:
        """Connect now what the first call would connect; every member must call this.

        As ``admit`` and ``connect``, with their errors, but no thread has taken a lane afterwards.
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
        """The connections, to be made by ``connect`` if there are none yet, and the thread's lane.

        Args:
            operation: for an error's text.
            lane_name: of the calling thread's lane.
            order: given if any thread may use the lane.
            raises_later: whether the call leaves what its thread has yet to raise to its work, or
                to the next call.

        Returns:
            A mesh and a lane. With ``raises_later`` the mesh has ended if the thread has yet to
            raise why: on another rank the call of the same place may have begun before.

        Raises:
            BrokenGroupError: an earlier error has closed the connections for good.
            ObjcommError: what has closed them since this thread's last call; the next is served.
            UsageError: the group is destroyed, another thread has the lane, or this one has it and
                waits for a callback.
        """
        mesh = self._mesh
        if mesh is None or mesh.verdict is not None or self._owed:
            if mesh is not None:  # one that has ended, and a call on it perhaps has not
                _refuse_inside(operation, mesh.lanes.get(lane_name))
            mesh = self._settled(operation, raises_later=raises_later)
        lane = mesh.lanes.get(lane_name)
        if order is not None:
            return mesh, lane or self._taken(operation, mesh, lane_name, order)
        # One on which nothing is under way is nobody's to refuse.
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
        """Wait until every member has come and ``mesh`` is connected; see ``Mesh.connect``."""
        try:
            mesh.connect(self.store(), deadline, lane, operation, call_site, caller=caller)
        except ObjcommError:
            if mesh.verdict is not None:
                end_elsewhere(mesh.verdict)
            raise

    @property
    def mesh(self) -> Mesh | None:
        """The one that is in use, or the last one."""
        return self._mesh

    @property
    def is_busy(self) -> bool:
        """Whether a call waits on it, or is in flight."""
        mesh = self._mesh
        return mesh is not None and any(lane.is_busy for lane in tuple(mesh.lanes.values()))

    def retire(self) -> None:
        """Close what nobody uses any more, now that this process has destroyed the group."""
        mesh = self._mesh
        if mesh is None or sys.exc_info()[1] is not None:  # that error is the one to be told
            return
        with logged("could not check whether all ranks made the same calls"):
            comparison = audit.comparison(mesh)
            if comparison is not None:
                mesh.board_thread.submit(functools.partial(audit.compare, [comparison]))
            audit.retire(mesh, DESTROYED)

    @property
    def is_broken(self) -> bool:
        """Whether it can carry no more objects."""
        mesh = self._mesh
        return mesh is not None and mesh.verdict is not None and not mesh.can_be_replaced

    def absolve(self, verdict: Verdict) -> None:
        """End the connections by a verdict that the calling thread raises elsewhere.

        It stands for what had ended them before as well: on the other ranks, too, it is the last
        that such a thread raises before it goes on. Other threads raise what has ended them in
        their next calls, as they do on the other ranks.
        """
        mesh = self._mesh
        if mesh is None or (mesh.verdict is None and self._is_clear_of(mesh, verdict)):
            return
        mesh.settle(verdict)
        if not mesh.can_be_replaced:
            return
        with self._lock:
            for each in [*self._owed, mesh]:
                each.absolve(threading.current_thread())

    def _is_clear_of(self, mesh: Mesh, verdict: Verdict) -> bool:
        """Whether the other rank of a pair may have joined ``mesh`` when this was over for it."""
        return self._whole is not None and (mesh.link is None or mesh.outlives == verdict.name)

    def store(self) -> dist.Store:
        """Where the ranks of the world meet."""
        store: dist.Store = store_of(self._world())
        return store

    @property
    def _pair(self) -> str:
        return "-".join(map(str, self.members))

    def _settled(self, operation: str, *, raises_later: bool) -> Mesh:
        """A mesh that nothing has ended, once the thread has raised what ended the last one."""
        thread = threading.current_thread()
        with self._lock, self._change:
            self._owed = [each for each in self._owed if each.is_owed]
            for each in [*self._owed, self._mesh]:
                if each is None or each.verdict is None or not each.is_owed_by(thread):
                    continue
                if raises_later and each.link is not None:
                    return each
                each.absolve(thread)
                end_elsewhere(each.verdict)
                raise each.verdict.error(operation, each.last_position(thread))
            mesh = self._mesh
            if mesh is None or mesh.verdict is not None:
                mesh = self._mesh = self._renewed(operation, mesh)
            return mesh

    def _renewed(self, operation: str, ended: Mesh | None) -> Mesh:
        """A new mesh in the place of one that has ended."""
        if ended is not None and ended.verdict is not None:
            if ended.verdict.is_store_silent:  # the others may have another one by now
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
            # Not by ``self``, which holds the mesh: a cycle would keep its connections open.
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
        """The lane of that name for the calling thread."""
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
    """Refuse a call of a thread that is in another one on the same lane.

    Raises:
        UsageError: it is.
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
    """Whether what calls objcomm here has itself been called by a call of objcomm's."""
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
    """End the connections of a group that is no more, and let the other ranks know why."""
    verdicts: dict[Mesh, Verdict] = {}
    for channel in channels:
        mesh = channel.mesh
        if mesh is not None and mesh.verdict is None:
            verdicts[mesh] = mesh.destroyed()

    def tell(board: Board) -> None:
        for mesh, verdict in verdicts.items():
            if mesh.link is not None and mesh.verdict is None:
                mesh.stop(board.propose(mesh.nonce, verdict), board)

    # All in one: where the world has gone as well, the board's thread does no second job.
    for board_thread in {mesh.board_thread for mesh in verdicts}:
        with contextlib.suppress(StoreSilentError):
            board_thread.call(tell, FAREWELL_SECONDS)  # a question may keep it for 1.2 s
    for mesh, verdict in verdicts.items():
        mesh.stop(verdict._replace(is_store_silent=True))


def _is_destroyed(process_group: Callable[[], dist.ProcessGroup]) -> bool:
    try:
        return not is_alive(process_group())
    except UsageError:
        return True


def _mesh_of(channel: Channel) -> Mesh | None:
    return channel.mesh
