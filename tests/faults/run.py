"""Carries one case out, on processes of its own, and collects what each rank saw."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist

import objcomm
from objcomm import BrokenGroupError, CollectiveError, TransportError, TransportTimeout
from tests.faults import strike
from tests.faults.plan import FAULTS, LARGE_NBYTES, LIMIT_S, OPERATIONS, VICTIM, WORLD_SIZE
from tests.workers import Order, Pool, Report, here

#: Torch's own limit, where only that ends a wait.
TORCH_LIMIT_S = 8.0
_DEADLINE_S = 40.0
_DIED = "died"


@dataclass
class Outcome:
    """What one rank saw.

    Attributes:
        rank: which.
        error: the type of its error; ``"returned"`` if it had none.
        named: the ranks that the error names.
        seconds: from the fault to the error.
        was_next: whether it came in the rank's next call, after this one had returned.
        later: the type of the error of a call after that, or ``"works"``.
        text: the error's own.
        anew: whether the survivors' new group works.
        left: threads of objcomm's and keys in the store that should not be there any more.
    """

    rank: int
    error: str = "returned"
    named: tuple[int, ...] = ()
    seconds: float = 0.0
    was_next: bool = False
    later: str = ""
    text: str = ""
    anew: str = ""
    left: tuple[str, ...] = ()


def run_case(fault: str, operation: str, *, of_torch: bool = False) -> list[Outcome]:
    """Try one fault on one operation; the outcomes of all ranks that lived."""
    with TemporaryDirectory() as folder:
        pool = Pool(WORLD_SIZE, joined=False)
        try:
            arguments = {
                "fault": fault,
                "operation": operation,
                "of_torch": of_torch,
                "folder": folder,
            }
            reports = pool.run(Order(__name__, "carry_out", arguments), _DEADLINE_S)
        finally:
            pool.ruined = True
            pool.close()
        _judge(reports, dies=FAULTS[fault].dies)
        written = sorted(Path(folder).glob("outcome*"))
        return [_read(path) for path in written]


def _read(path: Path) -> Outcome:
    fields = json.loads(path.read_text(encoding="utf-8"))
    fields["named"], fields["left"] = tuple(fields["named"]), tuple(fields["left"])
    return Outcome(**fields)


def _judge(reports: list[Report], *, dies: bool) -> None:
    for report in reports:
        wanted = _DIED if dies and report.rank == VICTIM else "passed"
        assert report.outcome == wanted, f"rank {report.rank} {report.outcome}: {report.text}"


def carry_out(fault: str, operation: str, folder: str, *, of_torch: bool) -> None:
    """On each rank: the operation, with the fault on the victim."""
    place = here()
    dist.init_process_group(
        "gloo",
        store=place.store("rendezvous"),
        rank=place.rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=TORCH_LIMIT_S if of_torch else 1800),
    )
    dist.barrier()
    if not of_torch:
        objcomm.barrier()
    place.store("pids").set(str(place.rank), str(os.getpid()))
    began = Path(folder) / "began"

    def tell() -> None:
        began.write_text(str(time.time()))

    call = _call(fault, operation, of_torch=of_torch)
    made = call
    if place.rank == VICTIM:
        made = lambda: getattr(strike, FAULTS[fault].strike)(call, tell)  # noqa: E731  # the call, struck
    outcome = _outcome(made, call, fault, began)
    if not of_torch:
        _aftermath(outcome, fault, call)
    path = Path(folder) / f"outcome{place.rank}"
    path.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
    _end_together(fault)


def _call(fault: str, operation: str, *, of_torch: bool) -> Callable[[], Any]:
    about = OPERATIONS[operation]
    mine = bytes([here().rank]) * LARGE_NBYTES if FAULTS[fault].needs_payload else here().rank
    if of_torch and about.torch_call is not None:
        torch_call = about.torch_call
        return lambda: torch_call(mine)
    limit = {"timeout": LIMIT_S} if FAULTS[fault].is_limited else {}
    return lambda: about.call(mine, **limit)


def _outcome(
    made: Callable[[], Any], call: Callable[[], Any], fault: str, began: Path
) -> Outcome:
    """Make the call, and the next one where it returned, and note the first error."""
    outcome = Outcome(here().rank)
    if fault == "absent" and here().rank == VICTIM:
        made()
        return outcome
    is_block = fault == "raises"
    try:
        if is_block:
            with objcomm.fail_together():
                made()
                objcomm.barrier()
        else:
            made()
            outcome.was_next = True
            call()
    except Exception as error:  # noqa: BLE001  # whatever it is, it is noted
        outcome.error, outcome.text = type(error).__name__, str(error)
        outcome.named = _named(error)
        struck = float(began.read_text()) if began.exists() else time.time()
        outcome.seconds = time.time() - struck
    return outcome


def _named(error: BaseException) -> tuple[int, ...]:
    if isinstance(error, TransportTimeout):
        return error.missing
    if isinstance(error, TransportError):
        return error.peers
    if isinstance(error, CollectiveError):
        return tuple(error.failures)
    if isinstance(error, objcomm.DesyncError):
        return tuple(error.positions)
    return ()


def _aftermath(outcome: Outcome, fault: str, call: Callable[[], Any]) -> None:
    """What works, and what was left behind."""
    about = FAULTS[fault]
    if fault == "absent" and here().rank == VICTIM:
        return
    if not about.breaks:
        outcome.later = str(objcomm.all_gather(here().rank) == list(range(WORLD_SIZE)))
        return
    started = time.monotonic()
    try:
        call()
    except BrokenGroupError as error:
        outcome.later = type(error).__name__
        assert time.monotonic() - started < 1, "at once"
    if here().rank != VICTIM:
        survivors = [rank for rank in range(WORLD_SIZE) if rank != VICTIM]
        group = dist.new_group(survivors, use_local_synchronization=True)
        outcome.anew = str(objcomm.all_gather(here().rank, group=group) == survivors)
        outcome.left = tuple(_left())


def _left() -> list[str]:
    """Threads and keys that should not be there."""
    usual = {"MainThread", "objcomm-watch", "objcomm-bulletin"}
    threads = [each.name for each in threading.enumerate() if each.name not in usual]
    store = here().store("rendezvous")
    until = time.monotonic() + 3
    while True:
        keys = [key for key in store.list_keys() if _is_ours(key)]
        if not keys or time.monotonic() > until:
            return [*threads, *keys]
        time.sleep(0.05)


def _is_ours(key: str) -> bool:
    name = key.partition("objcomm/")[2]
    return bool(name) and not name.startswith(("asked", "where"))


def _end_together(fault: str) -> None:
    """Leave when all that live are done; who was stopped is ended by rank 0."""
    place = here()
    store = place.store("ends")
    store.set(str(place.rank), "")
    others = [rank for rank in range(WORLD_SIZE) if not (FAULTS[fault].dies and rank == VICTIM)]
    store.wait([str(rank) for rank in others])
    if fault == "stop" and place.rank == 0:
        os.kill(int(place.store("pids").get(str(VICTIM))), signal.SIGKILL)
