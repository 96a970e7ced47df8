"""Which network interfaces there are, and which of them Gloo and NCCL would take.

The rules are those of torch 2.13 and NCCL 2.28:
https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/distributed/c10d/ProcessGroupGloo.cpp
(``Options::create_default``, ``createDefaultDevice``), gloo/transport/tcp/device.cc, and
https://github.com/NVIDIA/nccl/blob/master/src/misc/socket.cc (``ncclFindInterfaces``), which
takes interfaces only that are up and have a carrier.
"""

import contextlib
import ctypes
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from objcomm.doctor.facts import UNKNOWN, Choice, Interface, is_loopback

# linux/sockios.h and net/if.h
_SIOCGIFCONF, _SIOCGIFFLAGS, _SIOCGIFMTU = 0x8912, 0x8913, 0x8921
_IFF_UP, _IFF_RUNNING = 0x1, 0x40
_IFREQ = struct.Struct("16s24s")
_MOST_ADDRESSES = 1024

_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_NCCL_MOST = 16
# What NCCL tries in turn, if nobody tells it.
_NCCL_ORDER = ("ib", "^docker,lo,virbr", "docker", "lo", "virbr")


def interfaces() -> tuple[Interface, ...]:
    """All of this host, in the kernel's order; none where the kernel is not Linux."""
    found = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        addresses = _addresses(asker)
        for _, name in socket.if_nameindex():
            flags, mtu = _ask(asker, _SIOCGIFFLAGS, name, "H"), _ask(asker, _SIOCGIFMTU, name, "i")
            is_up = bool(flags & _IFF_UP and flags & _IFF_RUNNING)
            mine = tuple(addresses.get(name, ()))
            found.append(Interface(name, mine, is_up, mtu, _mbit(name)))
    return tuple(found)


def _ask(asker: socket.socket, what: int, name: str, form: str) -> int:
    answer = fcntl.ioctl(asker, what, _IFREQ.pack(name.encode(), b""))
    return int(struct.unpack_from(form, answer, 16)[0])


def _addresses(asker: socket.socket) -> dict[str, list[str]]:
    """Addresses by interface, IPv4 first as getifaddrs has them."""
    found: dict[str, list[str]] = {}
    room = bytearray(_MOST_ADDRESSES * _IFREQ.size)
    at = ctypes.addressof((ctypes.c_char * len(room)).from_buffer(room))
    answer = fcntl.ioctl(asker, _SIOCGIFCONF, struct.pack("iL", len(room), at))
    nbytes = struct.unpack("iL", answer)[0]
    for raw_name, raw in _IFREQ.iter_unpack(bytes(room[:nbytes])):
        name = raw_name.split(b"\0")[0].decode().partition(":")[0]  # eth0:1 is an alias
        found.setdefault(name, []).append(socket.inet_ntoa(raw[4:8]))
    with contextlib.suppress(OSError):  # no IPv6
        for line in Path("/proc/self/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, _, _, _, _, name = line.split()
            address = str(ipaddress.IPv6Address(bytes.fromhex(digits)))
            found.setdefault(name, []).append(address)
    return found


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
    """The interface that Gloo, and so objcomm, would use.

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
