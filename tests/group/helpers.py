"""Shared by tests on ranks: groups, failing objects, and messages that bypass objcomm."""

import contextlib
import fcntl
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm._calls.group import resolve
from objcomm._observe.history import LENGTH
from objcomm._transport.store import loopback_store
from objcomm._world import bare, store_of
from tests.hosts import free_port
from tests.waits import PATIENCE_S, wait_until
from tests.workers import here

#: Operations in which rank 0 needs rank 1, and the arguments for that.
AWAIT_RANK_1: dict[str, dict[str, Any]] = {
    "broadcast": {"src": 1},
    "gather": {},
    "all_gather": {},
    "barrier": {},
    "all_reduce": {},
}


@contextlib.contextmanager
def subgroup(*members: int) -> Iterator[dist.ProcessGroup]:
    """A new group of these global ranks; every rank of the world must enter."""
    group = dist.new_group(list(members))
    if group is None:
        raise RuntimeError("torch made no group")
    try:
        yield group
    finally:
        if dist.get_rank() in members:
            dist.destroy_process_group(group)


def join_over_tcp() -> dist.TCPStore:
    """Join a world that meets in a store on this machine, which dies with rank 0."""
    place = here()
    store = loopback_store() if place.rank == 0 else None
    port = tell_all("the store's port", str(store.port) if store else "")[0]
    store = store or dist.TCPStore("127.0.0.1", int(port), is_master=False)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world_size)
    return store


@contextlib.contextmanager
def over_tcp() -> Iterator[int]:
    """A world that meets in a store on this machine; gives the store's port."""
    store = join_over_tcp()
    try:
        yield store.port
        tell_all("the store may close", "")
    finally:
        dist.destroy_process_group()


def kind_of(group: dist.ProcessGroup) -> str:
    """The kind of link of a group that has been used."""
    mesh = resolve(group)._whole.mesh  # noqa: SLF001  # nothing public has its name
    assert mesh is not None
    assert mesh.link is not None
    return mesh.link.kind


def groups_that_await_rank_1() -> dict[str, Any]:
    """A group of ranks 0 and 1 for each such operation, in which they have met."""
    groups = {name: dist.new_group([0, 1]) for name in AWAIT_RANK_1}
    for group in groups.values():
        objcomm.barrier(group=group)
    return groups


def assert_group_works(group: dist.ProcessGroup | None = None) -> None:
    """Check both directions, with a small message and one beyond the inline window."""
    mine, size = objcomm.rank(group), objcomm.world_size(group)
    assert objcomm.all_gather(mine, group=group) == list(range(size))
    last = objcomm.broadcast(bytes([mine]) * 100_000, group_src=size - 1, group=group)
    assert last == bytes([size - 1]) * 100_000


def tell_all(topic: str, text: str) -> list[str]:
    """Exchange texts between all ranks through a store, where objcomm itself is being broken."""
    place = here()
    store = place.store("tell_all")
    store.set(f"{topic}{place.rank}", text)
    return [store.get(f"{topic}{rank}").decode() for rank in range(place.world_size)]


def say(topic: str, text: str = "") -> None:
    """Send a text to the other ranks without objcomm; they call `hear` to receive it."""
    here().store("said").set(topic, text)


def hear(topic: str) -> str:
    """Wait until some rank has said it, and return the text."""
    text: bytes = here().store("said").get(topic)
    return text.decode()


def is_said(topic: str) -> bool:
    """Whether some rank has said it by now."""
    return bool(here().store("said").check([topic]))


def shared_port(topic: str = "port") -> int:
    """A port that was free a moment ago, the same on all ranks; another one for each topic."""
    return int(tell_all(topic, str(free_port()))[0])


def keys_in(store: dist.Store) -> list[str]:
    """The keys in a store; skips the test if this torch cannot list them."""
    if not hasattr(store, "list_keys"):
        pytest.skip("the stores of this torch, 2.8 or so, don't list their keys")
    keys: list[str] = store.list_keys()
    return keys


def keys_of_verdicts(store: dist.Store) -> set[str]:
    """The keys that verdicts, and the ranks that know them, have left in a store."""
    return {key for key in keys_in(store) if "verdict" in key or "known" in key}


def assert_no_verdict_stays(store: dist.Store) -> None:
    """Wait until the last rank has read each verdict, and so removed it.

    Only for a test's own world: the keys stay if a rank is never notified of a verdict.
    """
    wait_until(lambda: not keys_of_verdicts(store), "the last rank to remove a verdict's keys")


def error_in(kind: type[Exception], call: Callable[[], object], match: str | None = None) -> Any:
    """The error that a call must raise, and whose text must match."""
    with pytest.raises(kind, match=match) as caught:
        call()
    return caught.value


def fill_history() -> None:
    """Make as many calls on the world as are remembered: from then on each replaces another."""
    for _ in range(LENGTH):
        objcomm.barrier()


def is_waiting(group: dist.ProcessGroup | None = None) -> bool:
    """Whether the last call that this rank made on a group now waits for another rank."""
    (recorded,) = objcomm.recorder.dump(group=group or dist.group.WORLD)["groups"]
    last = recorded["entries"][-1]
    return bool(last["outcome"] == "under way" and last["awaits"] >= 0)


def outcome_of(call: Callable[[], object]) -> str:
    """The name of the error that a call raises, or ``"returned"``."""
    try:
        call()
    except objcomm.ObjcommError as error:
        return type(error).__name__
    return "returned"


def in_thread(body: Callable[[], object]) -> threading.Thread:
    """Start a thread whose `join` raises what it raised."""
    thread = _Raising(body)
    thread.start()
    return thread


class _Raising(threading.Thread):
    def __init__(self, body: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._body = body
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._body()
        except BaseException as error:  # noqa: BLE001  # raised again by join
            self._error = error
        finally:
            del self._body  # a lane keeps its last thread, which should keep nothing

    def join(self, timeout: float | None = None) -> None:
        super().join(timeout)
        if self._error is not None:
            raise self._error


def when_main_thread_waits(action: Callable[[], object]) -> threading.Thread:
    """Run `action` in a thread as soon as the main thread has stopped moving."""
    main = threading.main_thread().ident
    state = Path(f"/proc/self/task/{os.getpid()}/stat")  # the main thread's number is the process's

    def watch() -> None:
        last, still = None, 0
        while still < 15:
            frame = sys._current_frames()[main or 0]  # noqa: SLF001  # documented, if not public
            now = (id(frame), frame.f_lasti)
            # A thread that a busy machine keeps waiting for its turn stands still, too, but is "R".
            is_asleep = _state(state) == "S"
            still = still + 1 if now == last and is_asleep else 0
            last = now
            threading.Event().wait(0.01)
        action()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def _state(stat: Path) -> str:
    """What a process or a thread does, in the kernel's letter; nothing if it has ended."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that waits to be reaped does not."""
    return _state(Path(f"/proc/{pid}/stat")) not in {"", "Z"}


def thread_states(pid: int) -> set[str]:
    """Those of a process's threads, as the kernel calls them: "T" is stopped."""
    return {_state(each / "stat") for each in Path(f"/proc/{pid}/task").iterdir()}


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process for the duration of the block."""
    store: Any = bare(store_of(dist.group.WORLD))
    with Path(store.path).open("rb") as file:
        # Each access to the world's store locks its file. A process stopped during one would block
        # this process's accesses.
        fcntl.flock(file, fcntl.LOCK_EX)
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: thread_states(pid) == {"T"}, "all of its threads to stop")
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


class Held:
    """An object for weak references, too large to wait for the garbage collector."""

    def __init__(self) -> None:
        self.tensor = torch.ones(100_000)


class RefusesToPickle:
    """Raises the given error when it is pickled."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> NoReturn:
        raise self.error


class RefusesToArrive:
    """Can be sent, and raises on the named ranks when it is unpickled."""

    def __init__(self, *ranks: int) -> None:
        self.ranks = ranks

    def __setstate__(self, state: dict[str, tuple[int, ...]]) -> None:
        self.__dict__.update(state)
        if here().rank in self.ranks:
            raise LookupError(f"cannot be rebuilt on rank {here().rank}")


def assert_in_child(holds: Callable[[], bool]) -> None:
    """Check something in a forked child of this process."""
    child = os.fork()
    if child == 0:
        signal.alarm(round(PATIENCE_S))  # ends a hang
        with contextlib.suppress(BaseException):
            os._exit(0 if holds() else 1)
        os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def exit_at_once() -> NoReturn:
    """End this process as a crash would: no destructors, no clean shutdown."""
    os._exit(1)
