"""The device links, and which of a message's large members travel over them.

Members in the memory of an accelerator whose device type has a link always use it. If the message's
header says so, members in CPU memory do too, staged through the first link's device. A rank's own
``device=`` only decides how that rank sends. If a group has no link for a device type, codecs leave
no members on such devices.

A link moves data from accelerator memory to accelerator memory over the user's own group, with the
backend that the group names for the device type, such as NCCL. Such backends have no suitable tags,
and no timeout that leaves the group usable, so they carry only data that must not pass through the
CPU. Headers, and with them every agreement on what follows, are sent over the mesh.
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
    """The device links of one operation: none, or one per device type.

    Every method is called by all participating ranks, for the same messages in the same order.

    Attributes:
        devices: where to receive members that stay on an accelerator, in the order of the links.
        linked: the device types that the links connect, joined by commas; empty without links.
        staging: device type of the first link, over which members in CPU memory may be sent; empty
            without links.
    """

    def __init__(self, links: Sequence[DeviceLink] = ()) -> None:
        """Initialize the path.

        Args:
            links: one per device type; the same types in the same order on all ranks.
        """
        self._links = {link.device.type: link for link in links}
        self.devices = tuple(link.device for link in links)
        self.linked = ",".join(self._links)
        self.staging = next(iter(self._links), "")

    def joined(self, device_type: str, linked: str) -> torch.device | None:
        """Return where to place tensors of a device type, if all ranks have a link for it.

        Args:
            device_type: type of the tensors' device.
            linked: what all ranks agreed on: the ``linked`` of each, or an empty string.
        """
        link = self._links.get(device_type) if device_type in linked.split(",") else None
        return None if link is None else link.device

    def not_carried(self, message: Message) -> list[torch.Tensor]:
        """Return flat tensors of ``message`` that must be sent over the CPU's link."""
        return [] if self.is_staged(message) else message.following_on_host

    def is_staged(self, message: Message) -> bool:
        """Return whether members in CPU memory are sent over the first link, too."""
        return bool(message.header.flags & _STAGED)

    def carries(self, message: Message) -> bool:
        """Return whether a part of a message with a known body is sent over device links."""
        return bool(self._links and message.large) and bool(
            message.following_on_device or (self.is_staged(message) and message.following_on_host)
        )

    def send(self, message: Message, peer: int) -> None:
        """Send this rank's part to one peer."""
        for flat, link in self._carried(message):
            with _naming(peer):
                link.send(flat.to(link.device), peer)

    def recv(self, message: Message, peer: int) -> None:
        """Receive one peer's part into ``message``'s memory."""
        for flat, link in self._carried(message):
            with _naming(peer), _landing(flat, link) as staged:
                link.recv(staged, peer)

    def broadcast(self, message: Message, root: int, *, is_root: bool) -> None:
        """Send one rank's part into all other ranks' memory."""
        for flat, link in self._carried(message):
            with _naming(root), _landing(flat, link, is_sent=is_root) as staged:
                link.broadcast(staged, root)

    def broadcast_flat(self, flat: torch.Tensor, root: int) -> None:
        """Send ``root``'s bytes to all ranks, in memory of a link's device."""
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
    """Yield ``flat``, or memory on the link's device that is copied into ``flat`` afterwards."""
    if is_sent:
        yield flat.to(link.device)  # also from another device of that type
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
        raise  # this rank's failure, not a peer's
    except RuntimeError as error:
        raise TransportError("device link", peers, str(error)) from error


class DeviceLink(Protocol):
    """Transfers between accelerator memories, on the caller's current stream.

    All participating ranks must make these calls in the same order, because there are no tags.
    """

    device: torch.device

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """Copy ``root``'s content into every rank's ``flat``; every rank calls this."""

    def send(self, flat: torch.Tensor, peer: int) -> None:
        """Send to one rank, which calls ``recv``."""

    def recv(self, flat: torch.Tensor, peer: int) -> None:
        """Receive from one rank, which calls ``send``."""

    def all_to_all(self, flat: torch.Tensor, into: torch.Tensor) -> None:
        """Cut ``flat`` into one part per rank, and send each its part; every rank calls this."""

    def all_gather(self, flat: torch.Tensor, into: torch.Tensor) -> None:
        """Collect all ranks' ``flat`` in ``into``, in rank order; every rank calls this."""


class BackendLink:
    """Tensor transfers over the backend that ``group`` has for ``device``: NCCL, XCCL or another.

    Nothing in this class depends on the device type; the tests also run it with CPU tensors.

    Attributes:
        device: where the tensors are; without an index, the current device at each use.
        is_pairwise: whether ``send`` and ``recv`` may be called at any time between the group's
            collectives.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, *, is_pairwise: bool = False
    ) -> None:
        # Weak, because objcomm stores this link under its group; a strong one would keep both.
        self._group = weakref.ref(group)
        self.device = device
        self.is_pairwise = is_pairwise

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """See ``DeviceLink``. ``wait`` usually blocks the current stream, not the caller."""
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


# Gloo copies device memory to CPU memory first.
_HOST_BACKEND = "gloo"

#: Backends that send between two ranks in a communicator for that pair, on its own stream, so there
#: is no order between it and the group's collectives. Read in the sources of
#: ``ProcessGroupNCCL::pointToPoint`` and ``ProcessGroupXCCL::pointToPoint``. In other backends, a
#: message could come between two collectives on one rank only, and all ranks would wait forever.
PAIRWISE = frozenset({"nccl", "xccl"})


def device_links(group: dist.ProcessGroup) -> list[BackendLink]:
    """Return a link for each device type for which ``group`` has a dedicated backend.

    A backend that also serves CPU memory does not count, such as the single one that
    ``init_process_group("gloo")`` creates for all devices. Gloo would move CUDA tensors through CPU
    memory. objcomm's own connections do the same, and also notice when a rank dies and keep their
    timeouts. This function only inspects the group: it allocates no device memory and starts
    nothing on a device.

    Returns:
        Links sorted by device type, so that the order is the same on all ranks.
    """
    named: dict[str, str] = {}
    for device in group._device_types:  # noqa: SLF001  # torch has no public way to ask
        named[device.type] = _backend_name(group, device)
    # A group bound to a device uses one communicator for everything.
    pairwise = () if is_bound(group) else PAIRWISE
    return [
        BackendLink(group, torch.device(each), is_pairwise=named[each] in pairwise)
        for each in own_types(named)
    ]


def own_types(named: Mapping[str, str]) -> list[str]:
    """Return, sorted, the device types whose backend does not serve CPU memory.

    Args:
        named: names of backends by device type; empty if there is none.
    """
    hosts = {"", _HOST_BACKEND, named.get("cpu", _HOST_BACKEND)}
    return sorted(each for each, name in named.items() if name not in hosts)


def _backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of a group's backend for a device type; empty if it has none."""
    try:
        backend = group._get_backend(device)  # noqa: SLF001  # torch has no public way to ask
    except RuntimeError:
        return ""
    try:
        return backend.name().lower()
    except RuntimeError:  # a third-party backend that has no name
        return type(backend).__name__
