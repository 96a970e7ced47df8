"""The device links, and which of a message's large members travel over them.

Members that lie on an accelerator for whose type there is a link always do; where the message's
header says so, those in CPU memory do too, staged through the first link's device. What a rank was
asked for by its own ``device=`` decides only how it sends. Where a group has no link for a type, a
codec leaves nothing on such a device.

A link goes from accelerator memory to accelerator memory over the user's own group, by whatever
backend that names for the type of device: NCCL is one of them. Such backends have no tags for
this, and no time-out that leaves a group usable, so they carry only what must not pass through the
CPU. Headers, and so every agreement on what follows, stay on the mesh.
"""

from __future__ import annotations  # torch may be built without distributed

import contextlib
import weakref
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from objcomm._codecs.buffers import empty
from objcomm._wire.header import Flag
from objcomm._world import is_bound
from objcomm.errors import TransportError, WireError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from objcomm._wire.message import Message

_STAGED = int(Flag.STAGED)  # an IntFlag's ``&`` costs 0.7 µs


class DevicePath:
    """The device links of one operation, none or one for each of some types of device.

    Every method is called by all ranks concerned, for the same messages in the same order.

    Attributes:
        devices: where members that stay on an accelerator are received, in the order of the links.
        linked: the types of device that the links join, joined by commas; empty without one.
        staging: that of the first link, over which members in CPU memory may travel; likewise.
    """

    def __init__(self, links: Sequence[DeviceLink] = ()) -> None:
        """Begin.

        Args:
            links: of different types of device; the same types in the same order on all ranks.
        """
        self._links = {link.device.type: link for link in links}
        self.devices = tuple(link.device for link in links)
        self.linked = ",".join(self._links)
        self.staging = next(iter(self._links), "")

    def joined(self, device_type: str, linked: str) -> torch.device | None:
        """Where tensors of a type of device travel, if a link joins such devices on all ranks.

        Args:
            device_type: theirs.
            linked: what all ranks have agreed on: the ``linked`` of each, or nothing.
        """
        link = self._links.get(device_type) if device_type in linked.split(",") else None
        return None if link is None else link.device

    def not_carried(self, message: Message) -> list[torch.Tensor]:
        """Flat tensors of ``message`` that must go over the CPU's link."""
        return [] if self.is_staged(message) else message.following_on_host

    def is_staged(self, message: Message) -> bool:
        """Whether members that lie in CPU memory go over the first link, too."""
        return bool(message.header.flags & _STAGED)

    def carries(self, message: Message) -> bool:
        """Whether some of a message whose body is known travels here."""
        return bool(self._links and message.large) and bool(
            message.following_on_device or (self.is_staged(message) and message.following_on_host)
        )

    def send(self, message: Message, peer: int) -> None:
        """This rank's part towards one other."""
        for flat, link in self._carried(message):
            with _naming(peer):
                link.send(flat.to(link.device), peer)

    def recv(self, message: Message, peer: int) -> None:
        """One other's part towards this rank, into ``message``'s memory."""
        for flat, link in self._carried(message):
            with _naming(peer), _landing(flat, link) as staged:
                link.recv(staged, peer)

    def broadcast(self, message: Message, root: int, *, is_root: bool) -> None:
        """From one rank into all others' memory."""
        for flat, link in self._carried(message):
            with _naming(root), _landing(flat, link, is_sent=is_root) as staged:
                link.broadcast(staged, root)

    def broadcast_flat(self, flat: torch.Tensor, root: int) -> None:
        """``root``'s bytes into everybody's, in memory of a link's device."""
        with _naming(root):
            self._for(flat).broadcast(flat, root)

    def all_to_all(self, flat: torch.Tensor, into: torch.Tensor) -> None:
        """See ``DeviceLink``."""
        with _naming():
            self._for(flat).all_to_all(flat, into)

    def all_gather(self, flat: torch.Tensor, into: torch.Tensor) -> None:
        """See ``DeviceLink``."""
        with _naming():
            self._for(flat).all_gather(flat, into)

    def _for(self, flat: torch.Tensor) -> DeviceLink:
        link = self._links.get(flat.device.type)
        if link is None:
            raise WireError("ranks agreed on a device link, which this rank lacks")
        return link

    def _carried(self, message: Message) -> Iterator[tuple[torch.Tensor, DeviceLink]]:
        if not message.large:
            return
        staged = message.following_on_host if self.is_staged(message) else []
        carried = [(flat, self.staging) for flat in staged]
        carried += [(flat, flat.device.type) for flat in message.following_on_device]
        for flat, device_type in carried:
            link = self._links.get(device_type)
            if link is None:
                raise WireError(
                    f"{message.header.position} sends over a device link, which this rank lacks"
                )
            yield flat, link


@contextlib.contextmanager
def _landing(
    flat: torch.Tensor, link: DeviceLink, *, is_sent: bool = False
) -> Iterator[torch.Tensor]:
    """``flat``, or a stand-in for it on the link's device whose content ends in ``flat``."""
    if is_sent:
        yield flat.to(link.device)  # which moves it from another device of the type, too
    elif flat.device.type == link.device.type:
        yield flat
    else:
        staged = empty(flat.numel(), link.device)
        yield staged
        flat.copy_(staged)


@contextlib.contextmanager
def _naming(*peers: int) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise  # this rank's failure, and no peer's
    except RuntimeError as error:
        raise TransportError("device link", peers, str(error)) from error


class DeviceLink(Protocol):
    """Transfers between accelerator memories, on the caller's current stream.

    All ranks concerned call in the same order: there are no tags.
    """

    device: torch.device

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """Every rank: ``root``'s content into everybody's ``flat``."""

    def send(self, flat: torch.Tensor, peer: int) -> None:
        """To one rank, which receives."""

    def recv(self, flat: torch.Tensor, peer: int) -> None:
        """From one rank, which sends."""

    def all_to_all(self, flat: torch.Tensor, into: torch.Tensor) -> None:
        """Every rank: of ``flat``, in as many parts as there are ranks, each rank's to it."""

    def all_gather(self, flat: torch.Tensor, into: torch.Tensor) -> None:
        """Every rank: all ranks' ``flat`` one after another into ``into``."""


class BackendLink:
    """Tensor transfers of ``group``'s own backend for ``device``: NCCL, XCCL or any other one.

    Nothing in it is particular to a type of device: the tests drive it with CPU tensors, too.

    Attributes:
        device: where the tensors lie; without an index, it is the current one at each use.
        is_pairwise: whether ``send`` and ``recv`` may come at any time among the group's
            collectives.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, *, is_pairwise: bool = False
    ) -> None:
        # Weak: objcomm keeps this link by its group, and would never let either go.
        self._group = weakref.ref(group)
        self.device = device
        self.is_pairwise = is_pairwise

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """See ``DeviceLink``. As a rule ``wait`` blocks the current stream, not the caller."""
        self._own().broadcast(flat, root).wait()

    def send(self, flat: torch.Tensor, peer: int) -> None:
        """See ``DeviceLink``."""
        self._own().send([flat], peer, 0).wait()

    def recv(self, flat: torch.Tensor, peer: int) -> None:
        """See ``DeviceLink``."""
        self._own().recv([flat], peer, 0).wait()

    def all_to_all(self, flat: torch.Tensor, into: torch.Tensor) -> None:
        """See ``DeviceLink``."""
        self._own().alltoall_base(into, flat, [], []).wait()

    def all_gather(self, flat: torch.Tensor, into: torch.Tensor) -> None:
        """See ``DeviceLink``."""
        self._own()._allgather_base(into, flat).wait()  # noqa: SLF001  # all_gather_into_tensor's

    def _own(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise RuntimeError("the process group was destroyed")
        return group


# Gloo copies what lies on a device to CPU memory first.
_HOST_BACKEND = "gloo"

#: Backends that keep what two ranks send each other in a communicator of these two, on a stream of
#: its own, so that it has no order with the group's collectives. That is read from their sources,
#: ``ProcessGroupNCCL::pointToPoint`` and ``ProcessGroupXCCL::pointToPoint``. In any other one a
#: message might come between two collectives on one rank only, and all would wait for ever.
PAIRWISE = frozenset({"nccl", "xccl"})


def device_links(group: dist.ProcessGroup) -> list[BackendLink]:
    """A link for each type of device for which ``group`` names a backend of its own.

    A backend that serves CPU memory as well, as ``init_process_group("gloo")`` has one for all
    devices, is none: Gloo would take CUDA tensors through CPU memory, where objcomm's own
    connections do the same, hear of a rank that dies, and keep their limits. Asking costs no memory
    of a device, and begins nothing there: all is known from the group.

    Returns:
        By their types' names in order, so that it is the same one on all ranks.
    """
    named: dict[str, str] = {}
    for device in group._device_types:  # noqa: SLF001  # torch has no public way to ask
        named[device.type] = _backend_name(group, device)
    # A group that was bound to a device uses one communicator for everything.
    pairwise = () if is_bound(group) else PAIRWISE
    return [
        BackendLink(group, torch.device(each), is_pairwise=named[each] in pairwise)
        for each in own_types(named)
    ]


def own_types(named: Mapping[str, str]) -> list[str]:
    """The types of device, in order, whose backend serves no CPU memory.

    Args:
        named: names of backends by types of device; empty where there is none.
    """
    hosts = {"", _HOST_BACKEND, named.get("cpu", _HOST_BACKEND)}
    return sorted(each for each, name in named.items() if name not in hosts)


def _backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """What a group's backend for a type of device is called; empty if it has none."""
    try:
        backend = group._get_backend(device)  # noqa: SLF001  # torch has no public way to ask
    except RuntimeError:
        return ""
    try:
        return backend.name().lower()
    except RuntimeError:  # one of another library's, which gives no name
        return type(backend).__name__
