"""What a rank finds out without any other rank: its host, its addresses, names and interfaces.

Names are looked up and torch's store is asked in C, without a limit or with one that does not hold
always: a ``TCPStore`` waits for ever for a server that accepts and is silent (torch 2.13). So such
calls get one here. torch's store looks up the name of each client that connects, and answers
nobody meanwhile: in a slow look-up all ranks wait. A resolver may lose a query now and then, so one
quick look-up says little.

Which interfaces Gloo and NCCL would take follows the rules of torch 2.13 and NCCL 2.28:
https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/distributed/c10d/ProcessGroupGloo.cpp
(``Options::create_default``, ``createDefaultDevice``), gloo/transport/tcp/device.cc, and
https://github.com/NVIDIA/nccl/blob/master/src/misc/socket.cc (``ncclFindInterfaces``), which
takes interfaces only that are up and have a carrier.
"""

import contextlib
import errno
import fcntl
import importlib.metadata
import ipaddress
import os
import platform
import random
import resource
import shutil
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from objcomm._bootstrap.doctor.facts import (
    NO_ANSWER,
    NO_ROUTE,
    PLATFORMS,
    SLOW_LOOKUP_SECONDS,
    UNKNOWN,
    Choice,
    Interface,
    Lookup,
    Rendezvous,
    Report,
    is_loopback,
)
from objcomm._bootstrap.init import (
    accelerator_in,
    accelerator_type,
    default_backend,
    device_count,
    device_of,
)
from objcomm._environment import (
    Placement,
    interface_addresses,
    machine,
    placement_in,
    system,
)
from objcomm._transport.threads import carried_out
from objcomm.errors import UsageError

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T]) -> T:
    """What a call returns or raises, if it does in time.

    A call that does not is left behind in a daemon thread, which does not keep the program alive.

    Args:
        seconds: how long to wait.
        call: what to do.

    Raises:
        TimeoutError: it took longer.
    """
    outcome: Future[T] = Future()
    threading.Thread(
        target=carried_out, args=(call, outcome), name="objcomm-doctor", daemon=True
    ).start()
    return outcome.result(max(seconds, 0.0))


_RESOLVE_SECONDS = 5.0
_ATTEMPT_SECONDS = 3.0
_PAUSE_SECONDS = 0.2

_UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL}


class UnreachedError(Exception):
    """A port could not be reached; its text says how."""


def resolve(host: str, seconds: float = _RESOLVE_SECONDS) -> tuple[str, ...]:
    """The addresses that a name stands for, in the resolver's order.

    Args:
        host: a name or an address.
        seconds: how long to wait for the resolver.

    Raises:
        UnreachedError: none, or the resolver did not answer.
    """
    try:
        found = within(seconds, lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except TimeoutError:
        raise UnreachedError(f"looking up {host!r} took more than {seconds:g} s") from None
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UnreachedError(f"{host!r} stands for no address: {reason}") from None
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_own(address: str) -> bool:
    """Whether an address belongs to this host: a socket can be bound to it."""
    try:
        with _socket_for(address) as trial:
            trial.bind((address, 0))
    except OSError:
        return False
    return True


def own_address(host: str) -> str:
    """The first address of this host among those that a name stands for, as Gloo takes it."""
    try:
        return next(filter(is_own, resolve(host)), "")
    except UnreachedError:
        return ""


def reach(addresses: Sequence[str], port: int, deadline: float) -> str:
    """Try until a port of a host accepts a connection, which is closed again.

    Args:
        addresses: of the host; they are tried in turn.
        port: on it.
        deadline: until when, in seconds of ``time.monotonic``.

    Returns:
        The address of this end of the connection.

    Raises:
        UnreachedError: none did; how the last attempts ended.
    """
    while True:
        reasons = []
        for address in addresses:
            limit = min(_ATTEMPT_SECONDS, max(deadline - time.monotonic(), 0.1))
            try:
                return touch(address, port, limit)
            except UnreachedError as error:
                reasons.append(f"{address}: {error}")
        if time.monotonic() + _PAUSE_SECONDS > deadline:
            raise UnreachedError("; ".join(reasons))
        time.sleep(_PAUSE_SECONDS)


def touch(address: str, port: int, seconds: float) -> str:
    """Connect once; returns the address of this end.

    Raises:
        UnreachedError: how it ended.
    """
    try:
        with connect(address, port, seconds) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise UnreachedError(reason_of(error)) from None


def connect(address: str, port: int, seconds: float) -> socket.socket:
    """A connection to a port, whose every wait has that limit.

    Raises:
        OSError: there is none.
    """
    connection = _socket_for(address)
    try:
        connection.settimeout(seconds)
        connection.connect((address, port))
    except BaseException:
        connection.close()
        raise
    return connection


def listen(address: str, ports: Sequence[int] = ()) -> socket.socket:
    """A socket that listens at an address, at a port that was free.

    Args:
        address: of this host.
        ports: those of which it may be one; any if empty.

    Raises:
        OSError: it can't.
    """
    for port in random.sample(ports, len(ports)) or [0]:
        listener = _socket_for(address)
        try:
            listener.bind((address, port))
            listener.listen(socket.SOMAXCONN)
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE or not ports:
                raise
        else:
            return listener
    raise OSError(errno.EADDRINUSE, f"none of the ports {ports[0]}-{ports[-1]} is free")


def reason_of(error: OSError) -> str:
    """How a connection failed, in a few words."""
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return NO_ANSWER
    if error.errno == errno.ECONNREFUSED:
        return "connection refused"
    if error.errno in _UNREACHABLE:
        return NO_ROUTE
    return os.strerror(error.errno) if error.errno else str(error)


def _socket_for(address: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)


# linux/sockios.h and net/if.h
_SIOCGIFFLAGS, _SIOCGIFMTU = 0x8913, 0x8921
_IFF_UP, _IFF_RUNNING = 0x1, 0x40
_IFREQ = struct.Struct("16s24s")

_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_NCCL_MOST = 16
# What NCCL tries in turn, if nobody tells it.
_NCCL_ORDER = ("ib", "^docker,lo,virbr", "docker", "lo", "virbr")


def interfaces() -> tuple[Interface, ...]:
    """All of this host, in the kernel's order; none where the kernel is not Linux."""
    found = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        addresses = interface_addresses()
        for _, name in socket.if_nameindex():
            flags, mtu = _ask(asker, _SIOCGIFFLAGS, name, "H"), _ask(asker, _SIOCGIFMTU, name, "i")
            is_up = bool(flags & _IFF_UP and flags & _IFF_RUNNING)
            mine = tuple(addresses.get(name, ()))
            found.append(Interface(name, mine, is_up, mtu, _mbit(name)))
    return tuple(found)


def _ask(asker: socket.socket, what: int, name: str, form: str) -> int:
    answer = fcntl.ioctl(asker, what, _IFREQ.pack(name.encode(), b""))
    return int(struct.unpack_from(form, answer, 16)[0])


def _mbit(name: str) -> int:
    try:
        mbit = int(Path(f"/sys/class/net/{name}/speed").read_text(encoding="ascii"))
    except (OSError, ValueError):  # virtual ones have none
        return UNKNOWN
    return mbit if mbit > 0 else UNKNOWN


def interface_of(address: str, there: Sequence[Interface]) -> str:
    """The name of the interface that has an address; empty if none has."""
    for interface in there:
        if address in interface.addresses:
            return interface.name
    if is_loopback(address):  # all of 127.0.0.0/8 belongs to it
        return next((each.name for each in there if each.is_loopback), "lo")
    return ""


def gloo_choice(environ: Mapping[str, str], there: Sequence[Interface], own: str) -> Choice:
    """The interface that Gloo would use; objcomm too, where the user names it.

    Args:
        environ: as ``os.environ``.
        there: all interfaces.
        own: the first address of the host's name that this host has; empty if there is none.
    """
    wanted = environ.get(_GLOO, "")
    if len(wanted) > 1:  # torch looks no closer at shorter ones
        why = f"{_GLOO}={wanted}"
        known = {interface.name: interface for interface in there}
        for name in wanted.split(","):
            problem = _problem(name, known.get(name))
            if problem:
                return Choice(name, "", why, problem)
        first = known[wanted.split(",")[0]]
        return Choice(wanted, first.addresses[0], why)
    if own:
        return Choice(interface_of(own, there), own, "the host's name stands for this address")
    why = "the host's name stands for no address of this host, so torch takes loopback"
    return Choice("lo", "127.0.0.1", why)


def _problem(name: str, interface: Interface | None) -> str:
    if interface is None:
        return f"there is no interface {name!r}"
    if not interface.addresses:
        return f"interface {name!r} has no address"
    return "" if interface.is_up else f"interface {name!r} is down or has no cable"


def nccl_choice(environ: Mapping[str, str], there: Sequence[Interface]) -> Choice:
    """The interfaces that NCCL would use for its first meeting, and for data over TCP.

    Args:
        environ: as ``os.environ``.
        there: all interfaces.
    """
    family = {"AF_INET": 4, "AF_INET6": 6}.get(environ.get("NCCL_SOCKET_FAMILY", ""), 0)
    wanted = environ.get(_NCCL, "")
    if len(wanted) > 1:  # as NCCL has it
        why = f"{_NCCL}={wanted}"
        found = _matching(wanted, there, family)
        if not found:
            return Choice("", "", why, f"no interface matches {wanted!r}")
    else:
        pattern, found = next(
            ((each, found) for each in _NCCL_ORDER if (found := _matching(each, there, family))),
            ("", []),
        )
        why = (
            f"the first that NCCL finds: {pattern}*"
            if pattern != _NCCL_ORDER[1]
            else ("the first that is neither docker*, lo* nor virbr*")
        )
        if not found:
            return Choice("", "", "", "there is no interface with an address that is up")
    first_name, first_address = found[0]
    names = ",".join(dict.fromkeys(name for name, _ in found))
    return Choice(names or first_name, first_address, why)


def _matching(pattern: str, there: Sequence[Interface], family: int) -> list[tuple[str, str]]:
    """Interfaces and their addresses by NCCL's rule: ``^`` excludes, ``=`` is exact."""
    is_excluding = pattern.startswith("^")
    pattern = pattern.removeprefix("^")
    is_exact = pattern.startswith("=")
    prefixes = [each.partition(":")[0] for each in pattern.removeprefix("=").split(",") if each]
    found: list[tuple[str, str]] = []
    for version in (4, 6):
        for interface in there:
            name = interface.name
            fits = name in prefixes if is_exact else name.startswith(tuple(prefixes))
            known = [other for other, _ in found]
            if fits == is_excluding or not interface.is_up or name in known:
                continue
            found += [(name, each) for each in interface.addresses if _fits(each, version, family)][
                :1
            ]
    return found[:_NCCL_MOST]


def _fits(address: str, version: int, family: int) -> bool:
    is_wanted = family in {0, version} and ipaddress.ip_address(address).version == version
    return is_wanted and address != "::1"  # which NCCL skips


_TIMES = 50  # of a resolver that loses one query in twenty, this finds 92 %
_LOST_SECONDS = 0.9  # a resolver asks again after a second at the earliest
_ADDRESSES_MAX = 64
_AT_ONCE = 16


def lookups(callers: Mapping[str, int], seconds: float) -> tuple[Lookup, ...]:
    """Look up the name of each address again and again, until one look-up is slow.

    Args:
        callers: addresses from which ranks connect to the store, with the lowest rank of each.
        seconds: how long all may take.
    """
    if not callers:
        return ()
    deadline = time.monotonic() + seconds
    chosen = list(callers.items())[:_ADDRESSES_MAX]
    with ThreadPoolExecutor(min(_AT_ONCE, len(chosen)), "objcomm-doctor") as pool:
        return tuple(pool.map(lambda each: _lookup(each[0], each[1], deadline), chosen))


def _lookup(address: str, rank: int, deadline: float) -> Lookup:
    seen = as_seen(address)
    slowest, count, before = 0.0, 0, 0.0
    while count < _TIMES and slowest < SLOW_LOOKUP_SECONDS and time.monotonic() < deadline:
        began, is_lost = time.monotonic(), False
        try:
            within(
                deadline - began,
                lambda: socket.getnameinfo((seen, 0), socket.NI_NUMERICSERV),
            )
        except TimeoutError:
            is_lost = True
        except OSError:  # its name is unknown: that took as long
            pass
        took = time.monotonic() - began
        # A busy machine may wake a thread late, but not twice in a row.
        is_lost = is_lost or took >= _LOST_SECONDS
        slowest = max(slowest, took if is_lost else min(before, took))
        before = took
        count += 1
    return Lookup(rank, seen, slowest, count)


def as_seen(address: str) -> str:
    """What a store calls a client's address: it listens on both families where there are two."""
    try:
        socket.socket(socket.AF_INET6).close()
    except OSError:
        return address
    return address if ":" in address else f"::ffff:{address}"


_SHARED_MEMORY = "/dev/shm"  # noqa: S108  # its size is asked for, nothing is written there
# In torch's list, and no way to send anything.
_NO_BACKENDS = {"undefined", "fake"}
_TELLING = (
    "GLOO_SOCKET_IFNAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_IB_HCA",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_FAMILY",
    "NCCL_SOCKET_IFNAME",
    "TORCHELASTIC_USE_AGENT_STORE",
)


def examine(environ: Mapping[str, str]) -> tuple[Report, Placement | None]:
    """This process and its host, before it meets anybody.

    Args:
        environ: as ``os.environ``.

    Returns:
        What was found, and where the launcher has put this process: None if there is no launcher,
        or if its variables are wrong, which the report says.
    """
    place, place_problem = _place(environ)
    host = socket.gethostname()
    there = interfaces()
    size, free = _shared_memory()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    backend = default_backend() if dist.is_available() else ""
    local_rank = None if place is None else place.local_rank
    report = Report(
        rank=_rank(place, place_problem),
        world_size=1 if place is None else place.world_size,
        local_rank=UNKNOWN if local_rank is None else local_rank,
        launcher="" if place is None else place.launcher,
        host=host,
        machine=machine(),
        pid=os.getpid(),
        versions=_versions(),
        backends=_backends(),
        devices=devices(),
        backend=backend,
        place_problem=place_problem,
        device_problem=device_problem(place, backend),
        system=system(),
        shm_nbytes=size,
        shm_free_nbytes=free,
        open_files=_files(soft),
        open_files_most=_files(hard),
        interfaces=there,
        gloo=gloo_choice(environ, there, own_address(host)),
        nccl=nccl_choice(environ, there),
        rendezvous=Rendezvous() if place is None else Rendezvous(place.host, place.port),
        token=uuid.uuid4().hex,
        environment={name: environ[name] for name in _TELLING if name in environ},
    )
    return report, place


def _place(environ: Mapping[str, str]) -> tuple[Placement | None, str]:
    try:
        place = placement_in(environ)
    except UsageError as error:
        return None, str(error).removeprefix("init: ")
    if place is not None and not place.host:
        return None, (
            f"{place.launcher} has started {place.world_size} ranks, but MASTER_ADDR is not set; "
            "set it to the host of rank 0, the same on every rank"
        )
    return place, ""


def _rank(place: Placement | None, problem: str) -> int:
    if place is not None:
        return place.rank
    return UNKNOWN if problem else 0


def _versions() -> dict[str, str]:
    try:
        version = importlib.metadata.version("objcomm")
    except importlib.metadata.PackageNotFoundError:  # it runs from a folder
        version = "unknown"
    found = {"python": platform.python_version(), "torch": torch.__version__, "objcomm": version}
    for name in PLATFORMS:
        platform_version = getattr(torch.version, name, None)
        if platform_version is not None:
            found[name] = str(platform_version)
    if _is_there("nccl"):
        nccl = torch.cuda.nccl.version()
        found["nccl"] = ".".join(map(str, nccl))
    return found


def _is_there(backend: str) -> bool:
    return dist.is_available() and dist.is_backend_available(backend)


def _backends() -> tuple[str, ...]:
    known = dist.Backend.backend_list if dist.is_available() else []
    return tuple(name for name in known if name not in _NO_BACKENDS and _is_there(name))


def devices() -> tuple[str, ...]:
    """What the devices of this machine's accelerator are called; by type if they have no names."""
    device_type = accelerator_type()
    count = device_count(device_type) if device_type else 0
    name = getattr(torch.get_device_module(device_type), "get_device_name", None) if count else None
    return tuple(device_type if name is None else str(name(at)) for at in range(count))


def device_problem(place: Placement | None, backend: str) -> str:
    """Why this rank would get no device of its own under a backend; empty if it would."""
    device_type = accelerator_in(backend)
    if place is None or not device_type:
        return ""
    try:
        device_of(place, device_type, None)
    except UsageError as error:
        return str(error).removeprefix("init: ")
    return ""


def _shared_memory() -> tuple[int, int]:
    try:
        usage = shutil.disk_usage(_SHARED_MEMORY)
    except OSError:
        return UNKNOWN, UNKNOWN
    return usage.total, usage.free


def _files(limit: int) -> int:
    """A limit as a number, where the kernel may say that there is none."""
    return 2**31 if limit == resource.RLIM_INFINITY else limit
