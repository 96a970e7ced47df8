"""``survivors``: a new process group of the ranks that are alive, agreed on through the store.

Ranks learn of a death at different times, and their own lists of survivors may differ. So there is
only one list, under one key of the store: a verdict on the old group, whose ``ranks`` are excluded.
A rank changes it only by compare-and-swap:

1. The first rank to call excludes the ranks known to have ended, and those that can't be reached.
   The ranks on the list meet and connect, without the others. If one of them dies meanwhile, the
   verdict on their meeting names it, and a new round begins without it, under a new name.
2. A rank that knows that all ranks on the list have created the process group marks the list as
   final. A rank whose call failed replaces the list instead, if it is not final yet. So either all
   ranks on a list return its group, or none does.
"""

import functools
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from objcomm._calls.group import Group, resolve
from objcomm._collectives.split import Members, connected, fresh_name
from objcomm._config import GroupLike, Timeout
from objcomm._failures.losses import SURELY_ANSWERED_SECONDS, lost_ranks
from objcomm._failures.noticeboard import PATIENCE_SECONDS, Board, StoreSilentError
from objcomm._failures.verdict import Cause, Verdict
from objcomm._failures.watchdog import board_thread_of
from objcomm._transport.link import Deadline
from objcomm._wire.header import Operation
from objcomm._world import is_initialized, process_group_of
from objcomm.errors import NotInGroupError, ObjcommError, TransportError, TransportTimeout

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")

_CALLED = Operation.SURVIVORS.name.lower()
_SILENT = "its connections have ended, and it does not answer"
_PAUSE_SECONDS = 0.05


class _ReplacedError(Exception):
    """Another rank has replaced the list. Used only within this module."""


def survivors(group: GroupLike = None, timeout: Timeout = None) -> "dist.ProcessGroup":
    """Create a group of the ranks that are alive, after any number of others have died.

    Every rank of ``group`` that is alive must call this, for example when a call has raised
    TransportError. The ranks agree on one list, so all of them get a group of the same ranks, even
    if each knows of different deaths. If another rank dies meanwhile, they start again without it.
    If no rank has died, the new group has all ranks.

    The new group has the backend and timeout of ``group``, and its own connections. If a rank was
    excluded, the connections of ``group`` are closed: calls on it that still wait raise. Ranks meet
    in torch's store, so the process that hosts it must be alive: torchrun's agent, or rank 0 if the
    ranks were started without it.

    Args:
        group: process group or one-dimensional device mesh; defaults to the world.
        timeout: seconds or timedelta; None uses the group's timeout.

    Returns:
        A ``torch.distributed.ProcessGroup`` of the ranks that are alive, in the order of ``group``,
        which torch's functions also accept. Without torch.distributed, None, which means a world of
        one.

    Raises:
        UsageError: an argument is invalid. Raised on each rank that passed it, before any traffic.
        NotInGroupError: this rank is not a member of ``group``, or it is alive but the other ranks
            could not reach it and continue without it.
        TransportTimeout: a rank that is alive did not call this. Raised on every rank that waited
            for it; ``missing`` lists ranks of ``group``. The ranks may call this again.
        TransportError: the process that hosts torch's store is gone. Raised on every rank.
        CollectiveError: some rank could not connect. Raised on every rank; no rank has the new
            group then. The error numbers ranks as in the new group.

    Examples:
        >>> import objcomm
        >>> group = None
        >>> try:
        ...     total = objcomm.all_reduce(1, "sum", group=group)
        ... except objcomm.TransportError:
        ...     group = objcomm.survivors(group, timeout=60)
        >>> objcomm.all_gather("still here", group=objcomm.survivors(group))
        ['still here']
    """
    whole = resolve(group, _CALLED)
    deadline = whole.deadline(_CALLED, timeout)
    if not is_initialized():
        return cast("dist.ProcessGroup", None)  # as ``group=``, None means this rank alone
    agreement = _Agreement(whole, deadline)
    standing = agreement.begin()
    while True:
        if whole.rank in standing.ranks:
            raise NotInGroupError(
                f"survivors: global rank {whole.ranks[whole.rank]} is alive, but the other ranks "
                f"could not reach it and continue without it ({standing.reason}); end this process"
            )
        if standing.ranks:  # ranks that still wait in a call on the old group join sooner
            whole.mark_raised(standing._replace(is_final=True), whole.ranks)
            agreement.leave(whole)
        members = tuple(rank for rank in range(whole.size) if rank not in standing.ranks)
        part: Any = whole.new_part(members, f"round {standing.name}")
        part.let_go()
        everyone = tuple(range(part.size))
        plan = everyone, fresh_name(everyone, standing.name)
        decide = functools.partial(agreement.decide, standing)
        try:
            made = connected(Operation.SURVIVORS, "", plan, part, deadline, decide=decide)
        except (ObjcommError, _ReplacedError) as error:
            following = agreement.after(standing, part, error)
            if following is None:
                # The next call needs a new name: a part of torch's group may have the old one, and
                # its addresses stay in the store.
                agreement.decide(standing, has_connected=False)
                if isinstance(error, TransportTimeout):
                    # The limit that has passed may be another rank's.
                    seconds = deadline.seconds if deadline.has_passed else error.seconds
                    raise _renumbered(error, members, seconds) from None
                raise
            standing = following
        else:
            agreement.end(standing)
            return cast("dist.ProcessGroup", made)
        finally:
            mesh = part.mesh
            if mesh is not None:  # the new group has its own connections
                mesh.stop(mesh.destroyed()._replace(is_store_silent=True))


class _Agreement:
    """One agreement of a group's ranks, in the store under a key that only they use."""

    def __init__(self, whole: Group, deadline: Deadline) -> None:
        self._whole = whole
        self._deadline = deadline
        self._board_thread = board_thread_of(process_group_of(None))
        self._key = whole.agreement
        self._left: set[str] = set()  # see ``leave``

    def leave(self, group: Group) -> None:
        """Note a group whose calls this rank has ended; ``end`` removes the verdict on them."""
        if group.mesh is not None and group.mesh.nonce:
            self._left.add(group.mesh.nonce)

    def begin(self) -> Verdict:
        """Return the list in the store, or write one that excludes ranks known to be lost."""
        whole, end_of, silent = self._whole, self._board_thread.processes.end_of, self._silent()

        def propose(board: Board) -> Verdict:
            standing = board.look(self._key)
            if standing is not None:
                return standing
            board.learn(whole.ranks)
            ends = {
                rank: end_of(each) or _SILENT * (each in silent)
                for rank, each in enumerate(whole.ranks)
            }
            gone = tuple(rank for rank, why in ends.items() if why)
            return board.propose(self._key, _excluding(gone, ends[gone[0]] if gone else ""))

        standing = self._held(propose)
        while standing.is_final and whole.rank not in standing.ranks:
            # An interrupted call of this rank took part in it.
            self.end(standing)
            self._key = whole.agreement
            standing = self._held(propose)
        return standing

    def _silent(self) -> list[int]:
        """Return global ranks on other hosts that the old group has lost and that do not answer.

        The kernel knows about ranks on this host; a rank on another may be reported by a neighbor.
        """
        mesh, processes = self._whole.mesh, self._board_thread.processes
        question = 0

        def ask(board: Board) -> list[int]:
            nonlocal question
            lost = [] if mesh is None else list(lost_ranks(mesh, board))
            board.learn(lost)
            far = [rank for rank in lost if not processes.is_beside(rank)]
            question = board.ask() if far else 0
            return far

        def look(board: Board) -> list[int]:
            self._board_thread.answer(board)  # which that thread otherwise does only when idle
            return [rank for rank in silent if board.read(rank, question) is None]

        silent = self._ask(ask)
        until = time.monotonic() + SURELY_ANSWERED_SECONDS
        while silent and time.monotonic() < until:
            time.sleep(_PAUSE_SECONDS)
            silent = self._ask(look)
        return silent

    def decide(self, standing: Verdict, has_connected: bool) -> bool:  # noqa: FBT001  # a callback
        """Return whether all ranks on the list keep the group that they have created.

        Args:
            standing: the list.
            has_connected: whether this rank knows that all have created it. It then makes the list
                final; otherwise it replaces the list, so that no rank can make it final any more.

        Raises:
            _ReplacedError: another rank has replaced the list.
        """
        wanted = standing._replace(is_final=True)
        if not has_connected:
            wanted = standing._replace(name=uuid.uuid4().hex)
        try:
            held = self._held(lambda board: board.revise(self._key, standing, wanted))
        except TransportError:  # the store is gone
            if has_connected:
                raise
            return False
        if has_connected and held != wanted:
            raise _ReplacedError
        return held.is_final and held.name == standing.name

    def after(self, standing: Verdict, part: Group, error: Exception) -> Verdict | None:
        """Return the list of the next round after one has failed; None if no rank was lost.

        Args:
            standing: the list of the failed round.
            part: the ranks that met in it.
            error: the error of that round.
        """
        if part.mesh is None:
            return None
        self.leave(part)
        try:
            held = self._held(lambda board: board.look(self._key) or standing)
        except TransportTimeout:
            if isinstance(error, _ReplacedError):
                raise
            return None  # the error of the round says more
        # Read after the store has answered: by then the ranks agree on the verdict.
        verdict, lost = part.mesh.posted_verdict, tuple[int, ...]()
        if verdict is not None and verdict.cause in (Cause.LOST, Cause.LEFT):
            lost = verdict.ranks
        elif verdict is not None and verdict.cause is Cause.APART:
            lost = verdict.ranks[1:]  # two ranks that can't connect to each other: keep the first
        if held.name != standing.name and (lost or isinstance(error, _ReplacedError)):
            return held
        if verdict is None or held != standing:
            return None
        if not lost:
            # After a desync, a rank that was still waiting in the old group raises now.
            return standing if verdict.cause is Cause.DESYNC and standing.ranks else None
        ranks = {part.ranks[each] for each in lost}
        gone = [rank for rank, each in enumerate(self._whole.ranks) if each in ranks]
        wanted = _excluding(tuple(sorted({*standing.ranks, *gone})), verdict.reason)
        return self._held(lambda board: board.revise(self._key, standing, wanted))

    def end(self, standing: Verdict) -> None:
        """Remove the list from the store once all of its ranks have returned.

        The verdicts on failed rounds and on the old group go with it: a rank that joined later, or
        that died, never acknowledges them. Each rank removes them after its own acknowledgement,
        so the last one leaves none. All stay if an excluded rank may be alive: that rank still has
        to find out.
        """
        key, whole, processes = self._key, self._whole, self._board_thread.processes
        excluded = [whole.ranks[rank] for rank in standing.ranks]
        left = self._left

        def acknowledge(board: Board) -> None:
            board.learn(excluded)
            if all(map(processes.end_of, excluded)):
                board.acknowledge(key, whole.size - len(excluded))
                for nonce in left:
                    board.retract(nonce)

        whole.has_agreed()
        self._board_thread.submit(acknowledge)

    def _held(self, job: Callable[[Board], Verdict]) -> Verdict:
        """Do what ``_ask`` does, for a job that returns the list in the store.

        Raises:
            TransportError: the list is damaged.
        """
        held = self._ask(job)
        if held.cause is not Cause.LOST:
            raise held.error(_CALLED)
        return held

    def _ask(self, job: Callable[[Board], T]) -> T:
        """Run a job on the board's thread and return its result.

        Raises:
            TransportTimeout: the store did not answer within the call's limit, or soon after it.
            TransportError: the store is gone.
        """
        try:
            seconds = max(self._deadline.seconds_left, PATIENCE_SECONDS)
            return self._board_thread.call(job, seconds)
        except StoreSilentError as silent:
            if isinstance(silent.__cause__, TimeoutError):
                seconds = self._deadline.seconds
                raise TransportTimeout(_CALLED, (), seconds, is_store_silent=True) from None
            raise TransportError(
                _CALLED,
                (),
                "the process that hosts torch's store has ended, and the other ranks can't meet "
                "without it; start the ranks with torchrun, whose agent hosts the store, or "
                "restart the job",
            ) from None


def _excluding(ranks: Members, reason: str) -> Verdict:
    return Verdict.of(Cause.LOST, ranks=ranks, reason=reason)


def _renumbered(error: TransportTimeout, members: Members, seconds: float) -> TransportTimeout:
    """Return a part's timeout with the ranks of the whole group and the limit of the whole call."""
    numbered = TransportTimeout(
        error.operation,
        tuple(members[rank] for rank in error.missing),
        seconds,
        [each._replace(rank=members[rank]) for rank, each in error.positions.items()],
        tuple(members[rank] for rank in error.silent),
        error.is_store_silent,
        error.silent_seconds,
    )
    numbered.recent, numbered.recorded = error.recent, error.recorded
    return numbered
