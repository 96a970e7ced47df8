"""One process of a case: join, make the call, report the result, and leave."""

import contextlib
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm import _world
from objcomm._collectives import split
from objcomm._failures import channel, inquiry, liveness, watchdog
from objcomm._failures.noticeboard import BoardThread
from objcomm._transport import link, rendezvous, threads
from objcomm._transport.store import loopback_store
from tests.faults import helpers, pairs, plan
from tests.faults.plan import (
    DEADLY,
    DIVISIONS,
    FAR_SECONDS,
    HELPERS,
    TORCH_CONNECTS_SECONDS,
    Case,
    Fault,
    Phase,
    contribution,
    expected,
    limit_of,
)
from tests.faults.victim import armed, ends_of, sockets, strike_for
from tests.group.helpers import when_main_thread_waits
from tests.group.operations import OPERATIONS, ROOTED, first
from tests.ranks import OVER_GLOO
from tests.waits import PATIENCE_S, wait_until

#: Torch's object collectives have no timeout per call, so the group gets a short one.
TORCHS_LIMIT_SECONDS = 5.0


@dataclass(frozen=True)
class Seen:
    """How one call ended on one rank.

    Attributes:
        call: 0 for the call in which the fault happened, 1 for the next one.
        error: the type's name; ``"returned"`` if it returned the expected result.
        ranks: the ranks that the error names.
        at: when, in seconds of a clock that all processes share.
        text: the error's text.
        silent: ranks that did not answer.
        is_store_silent: whether the store did not answer.
        places: the position of each rank that answered.
        seconds_of_limit: the timeout that the error names.
        began: when the rank made the call, on the same clock as ``at``.
    """

    call: int
    error: str
    ranks: tuple[int, ...]
    at: float
    text: str = ""
    silent: tuple[int, ...] = ()
    is_store_silent: bool = False
    places: Mapping[int, str] = field(default_factory=dict)
    seconds_of_limit: float = 0.0
    began: float = 0.0


class Left(NamedTuple):
    """What a process still holds after it has destroyed its groups."""

    threads: list[str]
    sockets: list[str]


def take_part(  # noqa: C901  # one step after another
    case: Case, rank: int, pipe: Connection, log: Path, *, is_patient: bool
) -> None:
    """Be one rank of a case.

    The parent sends the store's port, then triggers the later steps one by one.
    """
    if is_patient:
        _be_patient(case)
    patch.object(threads, "_IDLE_SECONDS", 0.2).start()  # each end of a case waits for idle threads
    if case.is_over_gloo:
        os.environ.update(OVER_GLOO)
    if case.phase is Phase.CONNECTING and case.fault in {*DEADLY, Fault.DISCONNECTED}:
        patch.object(_world, "CONNECT_MAX", timedelta(seconds=TORCH_CONNECTS_SECONDS)).start()
    if case.is_across:
        for module in (liveness, rendezvous):
            patch.object(module, "machine", return_value=f"host{case.host_of(rank)}").start()
    with log.open("wb") as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    gc.disable()  # no cycle may keep a connection open until the next collection
    store = _store(case, rank, pipe)
    baseline = sockets()
    limit = TORCHS_LIMIT_SECONDS if case.library == "torch" else FAR_SECONDS
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("first", store),
        rank=rank,
        world_size=case.world_size,
        timeout=timedelta(seconds=limit),
    )
    before_mesh = sockets()
    call = _call_of(case, rank)
    _meet(case, rank, store)
    mesh_sockets = sockets() - (baseline if case.library == "torch" else before_mesh)

    def stay() -> None:
        pipe.close()  # or the end of its parent would go unnoticed
        until = time.monotonic() + PATIENCE_S
        while log.exists() and time.monotonic() < until:
            time.sleep(0.05)

    strike = strike_for(case, lambda what: _report(pipe, what), stay, mesh_sockets, store.port)
    if rank == case.victim:
        _suffer(case, pipe, call, strike)
        del call
    else:
        if case.fault is Fault.INTERRUPTED:
            pipe.recv()  # until then the victim waits in its call
        pipe.send(_seen(case, rank, call))
        del call  # it refers to what failed
        if case.is_between_two:
            with contextlib.suppress(RuntimeError):  # from torch, whose group is now broken
                pairs.release(case, rank)
    for step in iter(pipe.recv, None):
        pipe.send(_STEPS[step](case, rank, store, baseline))
    sys.stdout.flush()


def _store(case: Case, rank: int, pipe: Connection) -> dist.TCPStore:
    if case.is_stores_host and rank == case.victim:
        store = loopback_store()
        pipe.send(store.port)
        return store
    return dist.TCPStore("127.0.0.1", pipe.recv(), None, is_master=False)


def _meet(case: Case, rank: int, store: dist.Store) -> None:
    """Connect as far as the case says; the world is then connected on every rank."""
    if case.library == "torch":
        dist.barrier()
        return
    if case.phase is not Phase.FIRST_USE:
        objcomm.barrier()
        if case.is_between_two:
            pairs.meet(case, rank)
        if case.is_apart and not case.is_disconnected:
            dist.destroy_process_group(objcomm.new_group(range(case.world_size)))
    if case.phase is Phase.AFTER_ERROR:
        with pytest.raises(objcomm.DesyncError):
            objcomm.barrier() if rank == case.victim else objcomm.all_gather(rank)
    # A rank that has returned may die immediately while another is still ending the same call. If
    # the store stops with the victim, only that rank waits: the others could get stuck here.
    store.add("joined", 1)
    if case.fault is not Fault.STORE_STOPPED or rank == case.victim:
        wait_until(lambda: store.add("joined", 0) == case.world_size, "all to have joined")


def _report(pipe: Connection, what: str) -> None:
    pipe.send((what, time.monotonic()))


def _call_of(case: Case, rank: int) -> Callable[[], Any]:
    if case.is_between_two:
        return pairs.call_of(case, rank)
    if case.operation in DIVISIONS:
        return _division(case, rank)
    if case.operation in {*HELPERS, "stream"}:
        return lambda: helpers.call(case, lambda: None)
    obj = contribution(case, rank)
    if case.library == "torch":
        return lambda: _torch_call(case, obj)
    options: dict[str, Any] = {"timeout": case.limit_seconds}
    if case.operation in ROOTED:
        options[ROOTED[case.operation]] = case.root
    return lambda: OPERATIONS[case.operation](obj, **options)


def _be_patient(case: Case) -> None:
    """Give the ranks and the store on a busy machine more time to answer than the package does."""
    patch.object(plan, "LIMIT_SECONDS", limit_of(case, is_patient=True)).start()
    if case.fault is Fault.STORE_STOPPED:
        return  # no rank should wait for a store that never answers
    # A stopped rank never answers.
    answers = 2.0 if case.fault is Fault.STOPPED else 6.0
    patch.object(inquiry, "_ANSWERS_WITHIN_SECONDS", answers).start()
    patch.object(BoardThread.call, "__defaults__", (8.0,)).start()
    patch.object(watchdog, "_EXPIRY_SECONDS", 16.0).start()
    patch.object(link, "_GRACE_SECONDS", 30.0).start()  # Gloo's own timeout comes last
    for module in (channel, watchdog):
        patch.object(module, "FAREWELL_SECONDS", 8.0).start()


def _end_patience() -> None:
    """Let the watchdog drop calls that are over: it keeps each until its own deadline for it.

    With the extra patience for a busy machine, that is 16 s after a timeout.
    """
    dog = watchdog._watchdogs.watchdog()  # noqa: SLF001  # the package need not hurry
    dog._fallbacks[:] = [(0.0, end) for _, end in dog._fallbacks]  # noqa: SLF001  # same reason
    dog._nudge()  # noqa: SLF001  # same reason


def _division(case: Case, rank: int) -> Callable[[], Any]:
    if case.operation == "leaders":  # one host per rank, or no connection is needed
        patch.object(split, "machine", lambda: f"host of rank {rank}").start()
    options: dict[str, Any] = {"timeout": case.limit_seconds}
    options |= {"color": 0} if case.operation == "split" else {}
    options |= {"ranks": range(case.world_size)} if case.operation == "new_group" else {}
    divide: Callable[..., Any] = getattr(objcomm, case.operation)
    return lambda: dist.get_process_group_ranks(divide(**options))


def _suffer(
    case: Case, pipe: Connection, call: Callable[[], Any], strike: Callable[[], None]
) -> None:
    if (
        case.phase is Phase.BEFORE
        or case.is_disconnected
        or (case.library == "torch" and case.phase is Phase.IN_CALL)
    ):
        if case.fault is Fault.ABSENT:
            _report(pipe, "fault")
            pipe.recv()
        elif case.fault is not Fault.INTERRUPTED:
            strike()
    if case.fault is Fault.INTERRUPTED:
        pipe.send(_interrupted(case, pipe, call))
        if case.is_resumable and case.library == "objcomm" and call() != _want(case, case.victim):
            raise AssertionError("the interrupt has lost a message")
        return
    if case.phase is Phase.CALLBACK:
        made = helpers.call if case.operation in HELPERS else _with_callback
        call = lambda: made(case, strike)  # noqa: E731  # replaces the other one
    with armed(case, strike):
        seen = _seen(case, case.victim, call)
    pipe.send(seen)


def _with_callback(case: Case, strike: Callable[[], None]) -> Any:
    obj = contribution(case, case.victim)
    if case.operation == "reduce_and_broadcast":
        return objcomm.reduce_and_broadcast(lambda: obj, lambda _: strike())

    def strike_first(left: Any, right: Any) -> Any:
        strike()
        return first(left, right)

    operation: Callable[..., Any] = getattr(objcomm, case.operation)
    return operation(obj, strike_first)


def _interrupted(case: Case, pipe: Connection, call: Callable[[], Any]) -> Seen:
    def press() -> None:
        _report(pipe, "fault")
        os.kill(os.getpid(), signal.SIGINT)

    when_main_thread_waits(press)
    try:
        for _ in range(1 if case.is_between_two else 2):
            call()
    except KeyboardInterrupt as error:
        return Seen(0, "KeyboardInterrupt", (), time.monotonic(), str(error))
    except Exception as error:  # noqa: BLE001  # reported to the parent
        return Seen(0, type(error).__name__, (), time.monotonic(), str(error))
    return Seen(0, "returned", (), time.monotonic())


def _want(case: Case, rank: int) -> Any:
    return pairs.expected(case, rank) if case.is_between_two else expected(case, rank)


def _seen(case: Case, rank: int, call: Callable[[], Any]) -> Seen:
    """Return how the call ends or, if this rank waits for nobody in it, the next call."""
    want = _want(case, rank)
    number = 0
    began = time.monotonic()
    try:
        while number < (1 if case.fault is Fault.RESUMED or case.is_between_two else 2):
            if call() != want:
                return Seen(number, "wrong", (), time.monotonic())
            number += 1
    except Exception as error:  # noqa: BLE001  # reported to the parent
        ranks = getattr(error, "missing", getattr(error, "peers", ()))
        return Seen(
            number,
            type(error).__name__,
            tuple(ranks),
            time.monotonic(),
            str(error),
            tuple(getattr(error, "silent", ())),
            bool(getattr(error, "is_store_silent", False)),
            {each: str(at) for each, at in getattr(error, "positions", {}).items()},
            float(getattr(error, "seconds", 0.0)),
            began,
        )
    return Seen(number - 1, "returned", (), time.monotonic())


def _call_again(case: Case, rank: int, *_: object) -> tuple[str, float]:
    """Return how a later call on the group ends, and after how long."""
    began = time.monotonic()
    return _end_of_later_call(case, rank), time.monotonic() - began


def _end_of_later_call(case: Case, rank: int) -> str:
    if case.is_between_two:
        return pairs.talk_again(case, rank)
    if case.is_apart:
        made = objcomm.new_group(case.survivors, timeout=case.limit_seconds)
        ranks = objcomm.all_gather(rank, group=made)
        dist.destroy_process_group(made)
        return str(ranks)
    try:
        objcomm.all_gather("later", timeout=case.limit_seconds)
    except objcomm.ObjcommError as error:
        return type(error).__name__
    return "returned"


def _begin_anew(case: Case, rank: int, store: dist.Store, *_: object) -> list[Any]:
    """Destroy the process group, and create one of the survivors over the same store."""
    members = case.survivors
    results: list[Any] = []
    if len(members) > 1:
        group: Any = dist.new_group(members, use_local_synchronization=True)
        results.append(objcomm.all_gather(rank, group=group))
        del group
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("second", store),
        rank=members.index(rank),
        world_size=len(members),
    )
    results.append(objcomm.all_gather(rank))
    results.append(len(objcomm.broadcast(bytes(100_000), group_src=len(members) - 1)))
    return results


def _leave(case: Case, rank: int, _: dist.Store, baseline: set[str]) -> Left:
    """Destroy everything, and report what is left."""
    dist.destroy_process_group()
    _end_patience()
    until = time.monotonic() + PATIENCE_S
    is_store_here = case.is_stores_host and rank == case.victim  # its sockets stay
    while (left := _left(baseline)).threads or (left.sockets and not is_store_here):
        if time.monotonic() > until:
            break
        time.sleep(0.02)
    return left


def _left(baseline: set[str]) -> Left:
    names = [each.name for each in threading.enumerate() if each.name.startswith("objcomm")]
    others = [name for name in names if name != "objcomm-watch"]
    # It has a pair of unnamed sockets, one pair per process.
    stayed = sorted(ends_of(sockets() - baseline), key=bool)
    return Left(others, stayed[2 if "objcomm-watch" in names else 0 :])


_STEPS: dict[str, Callable[[Case, int, dist.Store, set[str]], Any]] = {
    "call again": _call_again,
    "begin anew": _begin_anew,
    "leave": _leave,
}


def _torch_call(case: Case, obj: Any) -> Any:
    is_root = dist.get_rank() == case.root
    one: list[Any] = [obj if is_root and case.operation == "broadcast" else None]
    many: list[Any] = [None] * case.world_size
    if case.operation == "broadcast":
        dist.broadcast_object_list(one, src=case.root)
        return one[0]
    if case.operation == "scatter":
        objs = [obj] * case.world_size if is_root else None
        dist.scatter_object_list(one, objs, src=case.root)
        return one[0]
    if case.operation == "gather":
        dist.gather_object(obj, many if is_root else None, dst=case.root)
        return many if is_root else None
    dist.all_gather_object(many, obj)
    return many
