"""The part of each rank when two of them talk: the victim, its partner, and uninvolved ranks.

Each uninvolved rank receives a message that the partner sends after its own call, which the
victim's fault must not disturb. In a ring every rank is involved.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

import objcomm
from tests.faults.plan import DEADLY, FAR_SECONDS, Case, Fault, contribution

_RELEASE_TAG = 9
_RELEASED = "released"

Call = Callable[[], Any]


def meet(case: Case, rank: int) -> None:
    """Connect each pair of ranks."""
    for tag in range(1, case.world_size):
        peers = (rank + tag) % case.world_size, (rank - tag) % case.world_size
        objcomm.sendrecv("met", *peers, tag=tag)


def expected(case: Case, rank: int) -> Any:
    """Return what the call returns on one rank without a fault."""
    if case.operation == "sendrecv":
        return contribution(case, (rank - 1) % case.world_size)
    if rank not in {case.victim, case.partner}:
        return _RELEASED
    sender = case.partner if case.victim_receives else case.victim
    return None if rank == sender else contribution(case, sender)


def call_of(case: Case, rank: int) -> Call:
    """Return this rank's part.

    A call that is repeated after an interrupt completes what is left.
    """
    if rank not in {case.victim, case.partner} and case.operation != "sendrecv":
        return lambda: _recv(case, case.partner, _RELEASE_TAG)
    if case.operation == "sendrecv":
        return _in_a_ring(case, rank)
    peer = case.partner if rank == case.victim else case.victim
    is_sender = (rank == case.victim) != case.victim_receives
    return _sender_of(case, rank, peer) if is_sender else _receiver_of(case, peer)


def _sender_of(case: Case, rank: int, peer: int) -> Call:
    obj, limit = contribution(case, rank), case.limit_seconds
    if case.library == "torch":
        return lambda: dist.send_object_list([obj], peer)
    if case.operation in {"isend", "irecv"}:
        return _once_begun(lambda: objcomm.isend(obj, peer, timeout=limit))
    return lambda: objcomm.send(obj, peer, timeout=limit)


def _receiver_of(case: Case, peer: int) -> Call:
    limit = case.limit_seconds
    if case.library == "torch":
        return lambda: _torch_recv(peer)
    if case.operation in {"isend", "irecv"}:
        return _once_begun(lambda: objcomm.irecv(peer, timeout=limit))
    if case.operation == "probe":
        return lambda: _probe_and_recv(peer, limit)
    src = None if case.operation == "recv from any" else peer
    return lambda: objcomm.recv(src, timeout=limit)


def release(case: Case, rank: int) -> None:
    """Once the partner's call is over, release the ranks that wait for it."""
    if rank != case.partner or case.operation == "sendrecv":
        return
    for other in range(case.world_size):
        if other not in {case.victim, case.partner}:
            _send(case, other, _RELEASE_TAG)


def talk_again(case: Case, rank: int) -> str:
    """Let the survivors talk on, and learn of the fault in their next collective."""
    at = case.survivors.index(rank)
    after, before = (case.survivors[(at + by) % len(case.survivors)] for by in (1, -1))
    if objcomm.sendrecv(rank, after, before, tag=1) != before:
        return "wrong"
    if case.fault in DEADLY | {Fault.DISCONNECTED}:
        try:
            objcomm.all_gather("later")
        except objcomm.TransportError as error:
            return f"returned, then {type(error).__name__} naming {error.peers}"
    return "returned"


def _once_begun(begin: Callable[[], objcomm.Work[Any]]) -> Call:
    """Start the operation at the first call; a call after an interrupt waits for the same one."""
    begun: list[objcomm.Work[Any]] = []

    def call() -> Any:
        if not begun:
            begun.append(begin())
        try:
            return begun[0].wait()
        except Exception:
            begun.clear()  # its traceback refers to this frame, and the work to the error
            raise

    return call


def _probe_and_recv(peer: int, limit: float) -> Any:
    found = objcomm.probe(peer, timeout=limit)
    return objcomm.recv(found.src, tag=found.tag, timeout=limit)


def _in_a_ring(case: Case, rank: int) -> Call:
    calls = 0
    after, before = (rank + 1) % case.world_size, (rank - 1) % case.world_size

    def call() -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:  # the first call has sent it
            return objcomm.recv(before, timeout=case.limit_seconds)
        obj = contribution(case, rank)
        return objcomm.sendrecv(obj, after, before, timeout=case.limit_seconds)

    return call


def _recv(case: Case, src: int, tag: int) -> Any:
    if case.library == "objcomm":
        return objcomm.recv(src, tag=tag, timeout=FAR_SECONDS)
    return _torch_recv(src)


def _send(case: Case, dst: int, tag: int) -> None:
    if case.library == "objcomm":
        objcomm.send(_RELEASED, dst, tag=tag)
    else:
        dist.send_object_list([_RELEASED], dst)


def _torch_recv(src: int) -> Any:
    objs: list[Any] = [None]
    dist.recv_object_list(objs, src)
    return objs[0]
