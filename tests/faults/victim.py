"""Make something happen to this process at a chosen point of its next operation.

Wraps the functions that send and receive, because objcomm has no hooks for this.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed.distributed_c10d as c10d

from objcomm._algorithms.exchange import Exchange
from objcomm._collectives import split
from objcomm._p2p.mailbox import Mailbox
from objcomm._transport.gloo import POKE_TAG, GlooLink
from objcomm._transport.link import LANE_BITS, Link
from objcomm._transport.streams import StreamLink
from objcomm._wire.message import Message
from tests.faults.plan import Case, Fault, Phase

Strike = Callable[[], None]

_HANDOVERS = (StreamLink.send_share, StreamLink.recv_share)

# Long enough for some of a payload's bytes, never for all of 32 MiB.
_MOVING_SECONDS = 0.002


def sockets() -> set[str]:
    """Return this process's sockets, by the system's names for them."""
    return {target for _, target in _descriptors() if target.startswith("socket:")}


def ends_of(targets: set[str]) -> list[str]:
    """Return the two ends of each open socket in ``targets``; nothing for an unnamed one."""
    found = []
    for descriptor, target in _descriptors():
        if target in targets:
            found.append("")
            # It was closed meanwhile, or has no peer.
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:
                found[-1] = str(end.getsockname() or "")
                found[-1] += f" to {end.getpeername()}" * bool(found[-1])
    return found


def _descriptors() -> Iterator[tuple[int, str]]:
    for path in list(Path("/proc/self/fd").iterdir()):
        with suppress(FileNotFoundError):  # the descriptor of this listing
            yield int(path.name), str(path.readlink())


def strike_for(
    case: Case,
    report: Callable[[str], None],
    stay: Callable[[], None],
    mesh_sockets: set[str],
    store_port: int,
) -> Strike:
    """Return a function that does to this process what the case says.

    Args:
        case: the case.
        report: reports that it begins.
        stay: what a forked child does until the case is over.
        mesh_sockets: the sockets between ranks.
        store_port: the store's port, whose connection is left alone.
    """

    def strike() -> None:
        report("fault")
        if case.fault is Fault.KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        elif case.fault is Fault.EXITS:
            os._exit(1)
        elif case.fault is Fault.FORKED:
            if os.fork() == 0:
                stay()
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        elif case.fault is Fault.DISCONNECTED:
            shut(mesh_sockets, store_port)
        elif case.fault in {Fault.STOPPED, Fault.RESUMED, Fault.STORE_STOPPED}:
            # To this thread: a signal to the process may be handled by another thread first.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            report("resumed")

    return strike


def shut(targets: set[str], store_port: int) -> None:
    """Shut down those of ``targets`` that connect ranks."""
    for descriptor, target in _descriptors():
        if target in targets:
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                # Gloo aborts the process if a listening socket is shut down.
                is_listening = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if is_listening:
                    continue
                if connection.family == socket.AF_UNIX:
                    names = connection.getsockname(), connection.getpeername()
                    is_between_ranks = any(names)  # one has connected to the other's listener
                else:
                    is_between_ranks = connection.getpeername()[1] != store_port
                if is_between_ranks:
                    connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def armed(case: Case, strike: Strike) -> Iterator[None]:
    """Let ``strike`` happen once in the block, at the case's phase."""
    trap = _TRAPS.get(case.phase)
    if case.library == "torch":
        trap = None if case.phase in {Phase.BEFORE, Phase.IN_CALL} else _in_torch
    if trap is None:
        yield
        return
    struck: list[float] = []
    # Another thread that gets there must not do meanwhile what the case rules out.
    lock = threading.RLock()

    def once() -> None:
        with lock:
            if not struck:
                struck.append(time.monotonic())
                strike()

    with ExitStack() as patches:
        for place in trap(case, once):
            patches.enter_context(patch.object(*place))
        yield
    if not struck:
        raise AssertionError(f"{case} never came to its phase")


Places = list[tuple[Any, str, Callable[..., Any]]]


def _before(owner: Any, name: str, strike: Strike) -> tuple[Any, str, Callable[..., Any]]:
    original = getattr(owner, name)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        strike()
        return original(*args, **kwargs)

    return owner, name, replacement


def _before_head(_: Case, strike: Strike) -> Places:
    places: list[tuple[Any, str]] = [
        (Exchange, "send_head"),
        (Exchange, "recv_heads"),
        (Mailbox, "meet"),
    ]
    return [_before(owner, name, strike) for owner, name in places]


def _after_head(_: Case, strike: Strike) -> Places:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(self: Exchange, what: Any, *args: Any) -> Any:
            messages = [what] if isinstance(what, Message) else [each for _, each in what]
            if not all(message.is_all_head for message in messages):
                strike()
            return original(self, what, *args)

        return replacement

    names = ("send_rest", "relay_rest", "recv_rest")
    return [(Exchange, name, wrap(getattr(Exchange, name))) for name in names]


def _in_payload(_: Case, strike: Strike) -> Places:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(self: Link, *what: Any) -> Any:
            if original in _HANDOVERS:  # after it this rank has done all that the others need
                strike()
            pending, tag = original(self, *what), what[-1]
            if tag >> LANE_BITS and tag != POKE_TAG:  # a payload's tag
                time.sleep(_MOVING_SECONDS)
                strike()
            return pending

        return replacement

    names = [(link, name) for link in (GlooLink, StreamLink) for name in ("send", "recv")]
    names += [(StreamLink, "send_share"), (StreamLink, "recv_share")]
    return [(link, name, wrap(getattr(link, name))) for link, name in names]


def _in_torch(case: Case, strike: Strike) -> Places:
    """Torch sends sizes first, in one collective or two, then the pickled bytes."""
    calls: list[str] = []
    results: list[Any] = []
    payload_call = 3 if case.operation == "scatter" else 2

    def wrap(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if len(calls) != payload_call:
                results.append(original(*args, **kwargs))
                return results[-1]
            if case.phase is Phase.BETWEEN:
                strike()
                return original(*args, **kwargs)
            is_pair = name in {"send", "recv"}
            if is_pair:
                work = getattr(c10d, f"i{name}")(*args, **kwargs)
            else:
                work = original(*args, **kwargs, async_op=True)
            time.sleep(_MOVING_SECONDS)
            strike()
            work.wait()
            return results[-1] if is_pair else None  # the rank that sent

        return replacement

    names = ("broadcast", "all_gather", "gather", "scatter", "send", "recv")
    return [(c10d, name, wrap(name, getattr(c10d, name))) for name in names]


_TRAPS: dict[Phase, Callable[[Case, Strike], Places]] = {
    Phase.IN_CALL: _before_head,
    Phase.BETWEEN: _after_head,
    Phase.PAYLOAD: _in_payload,
    Phase.CONNECTING: lambda _, strike: [_before(split, "create", strike)],
}
