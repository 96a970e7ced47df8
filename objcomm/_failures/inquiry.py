"""Publish this process's snapshot, read those of other ranks, and end waits that cannot succeed.

All of this runs on the board's thread, because it talks to the store.
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence

from objcomm._failures import losses
from objcomm._failures.deadlock import (
    MEETING,
    Deadlock,
    LaneWait,
    Step,
    WaitSnapshot,
    difference,
    find_deadlock,
)
from objcomm._failures.losses import loss_in
from objcomm._failures.mesh import Mesh
from objcomm._failures.noticeboard import Board
from objcomm._failures.verdict import Cause, Verdict
from objcomm._observe.history import CallRecord
from objcomm._observe.log import log, logged
from objcomm._observe.stacks import frames_by_thread
from objcomm._observe.stats import totals
from objcomm._transport.lane import IN_TURNS, Lane
from objcomm._transport.store import pack_record
from objcomm._wire.header import operation_name
from objcomm.errors import Position, position_texts

# Most training scripts run threads of these libraries, which must not hide a deadlock.
_SERVING = frozenset({"torch", "tqdm"})

# An idle thread of an executor has this function as its innermost frame, because the executor's
# queue is written in C. A busy one has further frames below it.
_IDLE = ("concurrent.futures.thread", "_worker")


def wait_snapshot(meshes: Iterable[Mesh], asked: int) -> WaitSnapshot:
    """Return the snapshot of this process.

    Args:
        meshes: all of its meshes. One that has ended counts only if its group has no other.
        asked: the number of the question that the snapshot answers.
    """
    in_order = sorted(meshes, key=lambda mesh: mesh.verdict is not None)
    lanes = [
        _state(mesh, lane, entry)
        for mesh in in_order
        for lane in tuple(mesh.lanes.values())
        for entry in (of_each_kind(lane.waits()) or (None,))
    ]
    counted = totals()
    return WaitSnapshot(
        asked,
        threading.main_thread().ident or 0,
        tuple(lanes),
        is_single=is_single(),
        taken_at=time.monotonic(),
        calls=counted.calls,
        sent_nbytes=counted.sent_nbytes,
        received_nbytes=counted.received_nbytes,
    )


def of_each_kind(entries: Iterable[CallRecord]) -> list[CallRecord]:
    """Return a lane's calls; of those that no thread waits for, only the oldest of each kind.

    Calls of one kind wait for the same rank under the same conditions, so a finding about one
    holds for all, and a thousand of them cost no more than one.
    """
    found: dict[object, CallRecord] = {}
    for entry in entries:
        waiter = (entry.caller or entry).waiter
        kind = (
            (entry.awaits, entry.is_served, entry.has_own_limit, entry.blocks)
            if not waiter and entry.header.sequence != MEETING
            else id(entry)
        )
        known = found.setdefault(kind, entry)
        if entry.waits_since < known.waits_since:
            found[kind] = entry
    return list(found.values())


def is_single() -> bool:
    """Whether no thread but the main one can make calls."""
    return all(
        each is threading.main_thread()
        or each.name.startswith("objcomm-")
        or serves_a_library(each)
        or is_idle_in_a_pool(each)
        or is_out_of_python(each)
        for each in threading.enumerate()
    )


def serves_a_library(thread: threading.Thread) -> bool:
    """Whether a thread belongs to a library and makes no calls: a progress bar, a data loader."""
    target = getattr(thread, "_target", None)
    modules = (type(thread).__module__, getattr(target, "__module__", None) or "")
    return any(module.partition(".")[0] in _SERVING for module in modules)


def is_idle_in_a_pool(thread: threading.Thread) -> bool:
    """Whether a thread of an executor is idle, so only another thread can give it work.

    torch.compile and many libraries keep such threads until the program ends.
    """
    frame = frames_by_thread().get(thread.ident or 0)
    if frame is None:
        return False
    return (frame.f_globals.get("__name__"), frame.f_code.co_name) == _IDLE


def is_out_of_python(thread: threading.Thread) -> bool:
    """Whether a thread not started by Python is currently not executing Python code.

    Torch's thread for a device runs autograd hooks and then waits for the next backward pass, which
    another thread starts. Python lists the thread from then on, even after it has ended.
    """
    is_foreign = isinstance(thread, threading._DummyThread)  # noqa: SLF001  # no public equivalent
    return is_foreign and thread.ident not in frames_by_thread()


def _state(mesh: Mesh, lane: Lane, entry: CallRecord | None) -> LaneWait:
    entries = list(lane.past)
    order = lane.order
    if order is not None:
        next_sequence = lane.sequence + order.waiting
        waiter = 0 if entry is None else (entry.caller or entry).waiter
    elif entry is not None:
        next_sequence, waiter = entry.header.sequence + 1, lane.waiting_thread
    else:
        next_sequence, waiter = lane.sequence, 0
    # A wait that ends anyway, because its message is arriving or its caller set a timeout, is not
    # part of a deadlock, whichever rank searches for it.
    is_free = entry is None or entry.is_served or (entry.caller or entry).has_own_limit
    awaits = -1 if entry is None or is_free else entry.awaits
    last = entries[-1] if entries else None
    if entry is not None:
        seconds = time.monotonic() - entry.waits_since
    else:
        seconds = last.position().seconds if last is not None else 0.0
    is_idle = last is None or last.is_over
    return LaneWait(
        group=mesh.name,
        nonce=mesh.nonce,
        number=lane.number,
        thread=lane.owner.ident or 0,
        waiter=waiter,
        next_sequence=next_sequence,
        taken=-1 if order is None else lane.taken,
        now=None if entry is None else _step(entry),
        awaits=mesh.ranks[awaits] if awaits >= 0 else -1,
        since=0.0 if entry is None else entry.waits_since,
        seconds=seconds,
        past=tuple(_step(each) for each in entries),
        is_inside=entry is None and order is None and not is_idle,
        has_ended=mesh.verdict is not None,
        name="" if lane.name == IN_TURNS else lane.name,
        waits_for=-1 if entry is None or entry.awaits < 0 else mesh.ranks[entry.awaits],
    )


def _step(entry: CallRecord) -> Step:
    header = entry.header
    return Step(
        header.sequence,
        header.operation,
        header.root,
        header.fingerprint,
        header.call_site,
        entry.operation,
        header.name,
        _unmatched(entry),
    )


def _unmatched(entry: CallRecord) -> str:
    """Describe the messages available to a receive that waits for another tag."""
    found = entry.unmatched() if entry.unmatched is not None else []
    if not found:
        return ""
    messages = ", ".join(f"tag={tag} from rank {peer}" for peer, tag in found)
    have = "has" if len(found) == 1 else "have"
    return f"it takes tag={entry.header.tag}, but {messages} {have} arrived; tag=None takes any"


#: A call that waits for other ranks, with its mesh and lane.
Waiting = tuple[Mesh, Lane, CallRecord]

#: Snapshots by rank.
Answers = dict[int, WaitSnapshot]

# Idle ranks check three times a second whether their snapshots are wanted.
_ANSWERS_WITHIN_SECONDS = 0.4
_PAUSE_SECONDS = 0.02
# In a larger group whose timeouts expire together, one rank asks on behalf of all. If it finds
# nothing in time, the next one asks, and so on; from the fifth turn on all remaining ranks ask.
_MOST_ASKING = 8
_TURN_SECONDS = 0.05
_LAST_TURN = 5
# How many reads of an awaited verdict the store can serve per second.
_LOOKS_PER_SECOND = 4000
# A shorter timeout of a polling call is taken literally: asking other ranks may at most double it,
# and a fifth of the added time is reserved for the work after the answers.
_BRIEF_SECONDS = 0.5
_SHARE_OF_ANSWERS = 0.8
# Below this timeout no rank would answer in time.
_WORTH_ASKING_SECONDS = 0.1


def first_of_each_kind(waiting: Sequence[Waiting]) -> list[Waiting]:
    """Apply ``of_each_kind`` to the calls of each lane."""
    lanes: defaultdict[tuple[Mesh, Lane], list[CallRecord]] = defaultdict(list)
    for mesh, lane, entry in waiting:
        lanes[mesh, lane].append(entry)
    return [
        (mesh, lane, entry)
        for (mesh, lane), entries in lanes.items()
        for entry in of_each_kind(entries)
    ]


def investigate(board: Board, meshes: Sequence[Mesh], waiting: Sequence[Waiting]) -> None:
    """Check for each waiting call whether another rank has ended it, and whether it can succeed."""
    asked = board.ask()
    mine = board.publish(wait_snapshot(meshes, asked))
    for mesh in {id(mesh): mesh for mesh, _, _ in waiting}.values():
        losses.publish_ends_on_own_host(board, mesh)
    for mesh, lane, entry in waiting:
        if mesh.verdict is not None or not lane.has_waiting(entry):
            continue
        losses.learn(board, mesh, entry)
        if not entry.first_asked:
            entry.first_asked, entry.first_asked_at = asked, time.monotonic()
        if not (
            _end_if_verdict_posted(board, mesh, entry)
            or losses.is_lost(board, (mesh, lane, entry), meshes, asked)
        ):
            _look_for_conflict(board, mine, meshes, (mesh, lane, entry))


def _end_if_verdict_posted(board: Board, mesh: Mesh, entry: CallRecord) -> bool:
    """End a call if a verdict is posted for its mesh or a block around it; return whether one is.

    If a block has failed, all waiting calls of the mesh in the same blocks end: each is withdrawn
    if possible; otherwise the mesh ends.
    """
    posted = board.look(mesh.nonce) if mesh.nonce else None
    if posted is not None:
        mesh.stop(posted)  # not posted again: the others may have read and removed it
        return True
    for key in entry.blocks:
        posted = posted or board.look(key)
    if posted is not None:
        for each in [each for lane in tuple(mesh.lanes.values()) for each in lane.waits()]:
            if each.blocks == entry.blocks:
                end(board, mesh, each, posted)
    return posted is not None


def _look_for_conflict(
    board: Board, mine: WaitSnapshot, meshes: Sequence[Mesh], waiting: Waiting
) -> None:
    mesh, lane, entry = waiting
    start = mine.waiting_since(mesh.name, lane.number, entry.waits_since)
    if start is None:
        return
    asked, suspected = entry.suspicion or (entry.first_asked, None)
    conflict = find_deadlock(board.rank, mine, start, lambda rank: board.read(rank, asked))
    # Calls already made do not change, but snapshots are read one after another, and a busy rank's
    # may be old. So the same waits must be found twice, the second time in answers to a later
    # question. Two waits of one call, or two polls, differ: each has its own start time.
    calls = conflict and [
        (rank, *state[:3], state.since, step.sequence) for rank, state, step in conflict.found
    ]
    is_sure = conflict is not None and (
        conflict.is_published or conflict.is_of_one_lane or suspected == calls
    )
    entry.suspicion = (mine.asked, calls) if calls else None
    if conflict is not None and is_sure and lane.has_waiting(entry):
        if not conflict.is_of_one_lane and losses.is_deadlock_of_the_dead(board, meshes, conflict):
            return
        verdict = _desync(mesh, conflict)
        if conflict.is_of_one_lane:
            verdict = with_all_ranks(board, meshes, mesh, conflict.found[0][1].number, verdict)
        else:
            board.publish_deadlock(conflict)
            board.publish(mine)
        for other in meshes:  # before any connection closes, because that makes ranks look there
            if other is not mesh and other.verdict is None and other.nonce in verdict.meshes:
                board.propose(other.nonce, _desync(other, conflict))
        mesh.settle_on(board, verdict)


def _desync(mesh: Mesh, conflict: Deadlock) -> Verdict:
    positions = [
        _position(mesh, mesh.ranks.index(rank), state, step)
        for rank, state, step in conflict.found
        if rank in mesh.ranks
    ]
    meshes = {state.nonce for _, state, _ in conflict.found if state.nonce}
    return Verdict.of(
        Cause.DESYNC,
        reason=conflict.reason,
        positions=tuple(positions),
        meshes=tuple(sorted(meshes)),
        deadlock=b"" if conflict.is_of_one_lane else pack_record(conflict),
    )


def with_all_ranks(
    board: Board, meshes: Sequence[Mesh], mesh: Mesh, number: int, found: Verdict
) -> Verdict:
    """Extend a desync verdict on two ranks with the calls that all ranks made at that point.

    Two ranks cannot show which of many made the odd call. If their sequence numbers differ, they
    diverged in an earlier call.

    Args:
        board: the store.
        meshes: all meshes of this process.
        mesh: the mesh of the desync.
        number: the number of the lane.
        found: the verdict, with the calls of two ranks.
    """
    lane = next((each for each in tuple(mesh.lanes.values()) if each.number == number), None)
    sequences = {each.sequence for each in found.positions}
    is_known = len(mesh.members) == len(found.positions) and len(sequences) == 1
    if is_known or lane is None or lane.order is not None or not mesh.nonce:
        return found
    if len(mesh.members) > _MOST_ASKING and board.take_turn(mesh.nonce) > 1:
        until = time.monotonic() + _ANSWERS_WITHIN_SECONDS  # another rank asks and will post it
        while time.monotonic() < until and board.look(mesh.nonce) is None:
            time.sleep(len(mesh.members) / _LOOKS_PER_SECOND)
        return found
    asked, wanted = board.ask(), {mesh.ranks[rank] for rank in mesh.members}
    known = _known(mesh, _answers(board, meshes, asked, asked, lambda now, _: (wanted, now)))
    states = {rank: answer.lane(mesh.name, number) for rank, answer in known.items()}
    positions = {each.rank: each for each in found.positions}
    called: dict[int, Step] = {}
    for rank, state in states.items():
        past = () if state is None or state.nonce != mesh.nonce else state.past
        step = next((each for each in past if each.sequence == min(sequences)), None)
        if state is not None and step is not None:
            called[rank] = step
            positions[rank] = _position(mesh, rank, state, step)._replace(seconds=0, is_over=False)
        elif state is None or state.next_sequence <= min(sequences):
            positions[rank] = _where(mesh, lane, rank, known[rank])
    reason = found.reason
    if len(sequences) > 1:
        one, other = (called.get(each.rank) for each in found.positions)
        if one is None or other is None or one.agrees_with(other):
            return found
        reason = difference(one, other)
    return found._replace(reason=reason, positions=tuple(positions.values()))


def expire(board: Board, meshes: Sequence[Mesh], expiring: deque[Waiting]) -> None:
    """End calls whose timeouts have expired, with a verdict that lists where all ranks are.

    If a thousand ranks time out at the same time, they must not read a thousand snapshots each:
    only one does, and the others wait for its verdict.

    Args:
        board: the store.
        meshes: all meshes of this process.
        expiring: the calls. It is emptied; calls added meanwhile are handled as well.
    """
    if not expiring:
        return
    asked = board.ask()
    waiting = _taken(expiring)
    turns = _Turns(board)

    def wanted(now: float, _: object) -> tuple[set[int], float]:
        waiting.extend(_taken(expiring))
        # The answer is the same for all calls of a mesh in the same blocks.
        checked: dict[object, bool] = {}
        for mesh, lane, entry in waiting:
            if _still_waits(mesh, lane, entry) and (mesh, entry.blocks) not in checked:
                checked[mesh, entry.blocks] = _end_if_verdict_posted(board, mesh, entry)
        waiting[:] = [each for each in waiting if _still_waits(*each)]
        begin = [turns.begin(mesh, entry) for mesh, _, entry in waiting]
        asking = [
            each
            for each, at in zip(waiting, begin, strict=True)
            if now >= at and _is_time_for_answers(each[2], now)
        ]
        return _ranks_of(asking), max(begin, default=now)

    since = min(entry.first_asked or asked for _, _, entry in waiting)
    answers = _answers(board, meshes, asked, since, wanted)
    for mesh, lane, entry in waiting:
        known = _known(mesh, answers)
        end_late((mesh, lane, entry), meshes, known, board)
    turns.end()


class _Turns:
    """When this rank starts to ask the ranks of each mesh; until then another rank asks."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._began = time.monotonic()
        self._begin: dict[Mesh, float] = {}

    def begin(self, mesh: Mesh, entry: CallRecord) -> float:
        """Return the time from which this rank asks about a call."""
        # A call that can be withdrawn ends on this rank only, and a mesh without a nonce cannot
        # have a verdict in the store.
        if len(mesh.members) <= _MOST_ASKING or entry.withdraw is not None or not mesh.nonce:
            return self._began
        if mesh not in self._begin:
            turn = min(self._board.take_turn(mesh.nonce), _LAST_TURN)
            late = _ANSWERS_WITHIN_SECONDS + turn * _TURN_SECONDS
            self._begin[mesh] = self._began + (0.0 if turn == 1 else late)
        return self._begin[mesh]

    def end(self) -> None:
        """Restart the turns of meshes whose calls have succeeded: a later call may time out."""
        for mesh in self._begin:
            if mesh.verdict is None:
                self._board.end_turns(mesh.nonce)


def end_late(
    waiting: Waiting,
    meshes: Sequence[Mesh],
    answers: Answers | None,
    board: Board | None = None,
) -> None:
    """End a call whose timeout has expired, unless that wait has ended since.

    A call that has succeeded meanwhile must not end its mesh, which may be serving other calls.

    Args:
        waiting: the call, with its mesh and lane.
        meshes: all meshes of this process.
        answers: as for ``timeout_verdict``.
        board: the store; None if it did not answer in time.
    """
    mesh, lane, entry = waiting
    verdict = expiry_verdict(waiting, meshes, answers, board)
    # Read before the check, because it may be cleared when the wait ends. A loss ends the mesh.
    withdraw = entry.withdraw if verdict.cause is Cause.TIMEOUT else None
    # A later wait of the same call has its own timeout, which has not expired yet.
    if not lane.has_waiting(entry) or not entry.has_expired:
        return
    if withdraw is not None:
        withdraw(verdict)
    elif board is not None:
        mesh.settle_on(board, verdict)
    else:
        mesh.stop(verdict)


def is_brief(entry: CallRecord) -> bool:
    """Whether a polling call's timeout is so short that other ranks may not answer within it."""
    return entry.withdraw is not None and entry.limit_seconds < _BRIEF_SECONDS


def _is_time_for_answers(entry: CallRecord, now: float) -> bool:
    share = _SHARE_OF_ANSWERS * patience(entry)
    return not is_brief(entry) or now < entry.waits_until + share


def patience(entry: CallRecord) -> float:
    """Return the seconds by which a call may exceed its timeout so that other ranks can answer."""
    if not is_brief(entry):
        return _ANSWERS_WITHIN_SECONDS
    return entry.limit_seconds if entry.limit_seconds >= _WORTH_ASKING_SECONDS else 0.0


def report(
    board: Board, meshes: Sequence[Mesh], waiting: Sequence[Waiting], answered: threading.Event
) -> None:
    """Log what long-waiting calls wait for.

    Args:
        board: the store.
        meshes: all meshes of this process.
        waiting: the calls.
        answered: set once the store has answered.
    """
    asked = board.ask()
    all_are_asked_at = time.monotonic() + _SHARE_OF_ANSWERS * _ANSWERS_WITHIN_SECONDS

    def wanted(now: float, answers: Answers) -> tuple[set[int], float]:
        ranks: set[int] = set()
        for mesh, lane, entry in waiting:
            known = _known(mesh, answers)
            if _is_reported_by_another(mesh, lane, entry, known):
                continue
            lower = [mesh.ranks[rank] for rank in mesh.members if rank < mesh.rank]
            unheard = [rank for rank in lower if rank not in answers]
            # So that not every rank reads a thousand snapshots: among a few lower ranks there is
            # nearly always one that reports the call.
            ask_few = lane.order is None and unheard and now < all_are_asked_at
            ranks.update(losses.some(unheard) if ask_few else _ranks_of([(mesh, lane, entry)]))
        return ranks, now

    answers = _answers(board, meshes, asked, asked, wanted)
    answered.set()
    for mesh, lane, entry in waiting:
        known = _known(mesh, answers)
        is_reported = _is_reported_by_another(mesh, lane, entry, known)
        if mesh.verdict is None and lane.has_waiting(entry) and not is_reported:
            _warn(mesh, entry, timeout_verdict(mesh, lane, entry, known))


def _is_reported_by_another(mesh: Mesh, lane: Lane, entry: CallRecord, known: Answers) -> bool:
    """Whether a lower rank is in the same call and logs it: one line per call, not per rank."""
    has_come = _is_meeting if mesh.link is None else _has_arrived
    return lane.order is None and any(
        rank < mesh.rank and has_come(mesh, lane, entry, known[rank]) for rank in known
    )


def report_silence(waiting: Sequence[Waiting], answered: threading.Event) -> None:
    """Do what ``report`` does, without other ranks' snapshots, if the store has not answered."""
    if answered.is_set():
        return
    for mesh, lane, entry in waiting:
        if mesh.verdict is None and lane.has_waiting(entry):
            _warn(mesh, entry, timeout_verdict(mesh, lane, entry, None))


def _warn(mesh: Mesh, entry: CallRecord, verdict: Verdict) -> None:
    log.warning("%s", _text(entry, verdict), extra=mesh.labels)


def _text(entry: CallRecord, verdict: Verdict) -> str:
    awaited = [each for each in verdict.positions if each.rank in verdict.ranks]
    waits = (
        position_texts(awaited, verdict.silent, silent_seconds=verdict.silent_seconds)
        + ["store: no answer"] * verdict.is_store_silent
    )
    return f"{entry.position()} and waits: {'; '.join(waits) or 'all ranks are in it'}"


def _answers(
    board: Board,
    meshes: Sequence[Mesh],
    asked: int,
    since: int,
    wanted: Callable[[float, Answers], tuple[set[int], float]],
) -> Answers:
    """Collect the snapshots, by global rank, of ranks that answer in time.

    Args:
        board: the store.
        meshes: all meshes of this process.
        asked: the number of the question.
        since: the number of the oldest question that an answer may refer to.
        wanted: called repeatedly with the time and the snapshots so far. Returns the ranks whose
            snapshots are wanted, and until when to call it again even if none is missing.
    """
    answers = {board.rank: wait_snapshot(meshes, asked)}
    board.publish(answers[board.rank])
    until = time.monotonic() + _ANSWERS_WITHIN_SECONDS
    pause = max([_PAUSE_SECONDS, *(len(mesh.members) / _LOOKS_PER_SECOND for mesh in meshes)])
    while True:
        now = time.monotonic()
        ranks, again_until = wanted(now, answers)
        missing = ranks - answers.keys()
        found = {rank: board.read(rank, since) for rank in missing}
        answers |= {rank: answer for rank, answer in found.items() if answer is not None}
        if now >= again_until and (not missing or now > until):
            return answers
        if missing and missing <= answers.keys():
            continue
        time.sleep(pause)
        if board.asked() > board.answered:  # another rank has asked meanwhile
            board.publish(wait_snapshot(meshes, board.asked()))


def _ranks_of(waiting: Iterable[Waiting]) -> set[int]:
    return {mesh.ranks[each] for mesh, _, _ in waiting for each in mesh.members}


def _known(mesh: Mesh, answers: Answers) -> Answers:
    """Return the answers of the mesh's members by group rank."""
    return {rank: answers[mesh.ranks[rank]] for rank in mesh.members if mesh.ranks[rank] in answers}


def end(board: Board, mesh: Mesh, entry: CallRecord, verdict: Verdict) -> None:
    """End one call: withdraw it if possible, otherwise end its mesh."""
    if entry.withdraw is None:
        mesh.settle_on(board, verdict)
    else:
        entry.withdraw(verdict)


def _taken(expiring: deque[Waiting]) -> list[Waiting]:
    return [expiring.popleft() for _ in range(len(expiring))]


def _still_waits(mesh: Mesh, lane: Lane, entry: CallRecord) -> bool:
    return mesh.verdict is None and lane.has_waiting(entry)


def expiry_verdict(
    waiting: Waiting, meshes: Iterable[Mesh], answers: Answers | None, board: Board | None
) -> Verdict:
    """Return the verdict for an expired timeout: a loss that explains it, or the late ranks.

    Args:
        waiting: the call, with its mesh and lane.
        meshes: all meshes of this process.
        answers: as for ``timeout_verdict``.
        board: the store; None if it did not answer in time.
    """
    mesh, lane, entry = waiting
    loss = None
    if not is_brief(entry):  # a caller that polls is told by one of its next calls
        with logged("could not check whether a process has ended"):  # the call must end
            if board is not None:
                losses.learn_ends(board, mesh)
            blocks = {each.nonce: each.ranks for each in meshes}
            loss = loss_in(mesh, lane, entry, blocks, patience_seconds=0.0) or mesh.apart()
    if loss is not None:
        return loss._replace(is_final=True, is_store_silent=answers is None)
    return timeout_verdict(mesh, lane, entry, answers)


def timeout_verdict(
    mesh: Mesh, lane: Lane, entry: CallRecord, answers: dict[int, WaitSnapshot] | None
) -> Verdict:
    """Return the verdict for an expired timeout, with the missing ranks and all known positions.

    Args:
        mesh: the mesh of the call.
        lane: the lane that waits.
        entry: the call.
        answers: snapshots by group rank, including this rank's; ``None`` if the store did not
            answer.
    """
    awaited = (entry.awaits,) if entry.awaits >= 0 else ()
    processes = mesh.board_thread.processes.stopped()
    stopped = tuple(peer for peer in mesh.others if mesh.ranks[peer] in processes)
    if answers is None:
        # The awaited rank may itself wait for a stopped one, which may also be the store's host.
        return Verdict.of(
            Cause.TIMEOUT,
            ranks=stopped or awaited,
            seconds=entry.limit_seconds,
            silent=stopped,
            is_store_silent=True,
        )
    # A stopped rank's answer may date from before it was stopped.
    answers = {rank: answer for rank, answer in answers.items() if rank not in stopped}
    missing = tuple(
        rank
        for rank in mesh.others  # this rank has arrived, even if its own snapshot is older
        if rank not in answers or not _has_arrived(mesh, lane, entry, answers[rank])
    )
    return Verdict.of(
        Cause.TIMEOUT,
        ranks=missing or awaited,
        seconds=entry.limit_seconds,
        positions=tuple(_where(mesh, lane, rank, answers[rank]) for rank in sorted(answers)),
        silent=tuple(rank for rank in mesh.members if rank not in answers and not is_brief(entry)),
        silent_seconds=time.monotonic() - entry.first_asked_at if entry.first_asked else 0.0,
    )


def _is_meeting(mesh: Mesh, lane: Lane, entry: CallRecord, answer: WaitSnapshot) -> bool:
    state = answer.lane(mesh.name, lane.number)
    called = None if state is None else state.now
    return called is not None and called.sequence == entry.header.sequence


def _has_arrived(mesh: Mesh, lane: Lane, entry: CallRecord, answer: WaitSnapshot) -> bool:
    state = answer.lane(mesh.name, lane.number)
    if state is None or state.nonce != mesh.nonce or lane.order is not None:
        return False
    is_at_work = state.is_inside and state.past[-1].sequence == entry.header.sequence
    return state.next_sequence > entry.header.sequence and not is_at_work


def _where(mesh: Mesh, lane: Lane, rank: int, answer: WaitSnapshot) -> Position:
    state = answer.lane(mesh.name, lane.number)
    thread = answer.main_thread if state is None or lane.order is not None else state.thread
    waiting = answer.waiting_of(thread)
    if waiting is None and state is not None and state.now is not None:
        waiting = state  # an asynchronous call, while its thread continues
    # If that rank has not used the lane, its other lanes of the group may show why.
    if waiting is None and state is None:
        of_group = (each for each in answer.lanes if each.group == mesh.name)
        waiting = next((each for each in of_group if each.now is not None), None)
    if waiting is not None and waiting.now is not None:
        return _position(mesh, rank, waiting, waiting.now)
    position = Position(rank, "", 0, -1, "", is_over=True)
    if state is not None and state.past:
        position = _position(mesh, rank, state, state.past[-1])
    running = next((each for each in answer.running if each.thread == thread), None)
    if running is None or running.line == position.call_site:
        return position
    return position._replace(line=running.text, line_seconds=running.seconds)


def _position(mesh: Mesh, rank: int, state: LaneWait, step: Step) -> Position:
    is_meeting = step.sequence == MEETING
    return Position(
        rank=rank,
        operation=step.operation_name or operation_name(step.operation),
        sequence=0 if is_meeting else step.sequence,
        root=step.root,
        call_site=step.call_site,
        seconds=state.seconds,
        is_over=state.is_over(step),
        group="" if state.group == mesh.name else state.group,
        name=step.name,
        unmatched=step.unmatched,
        fingerprint=step.fingerprint,
        lane=state.name,
    )
