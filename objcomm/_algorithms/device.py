"""The device link, and which of a message's large members travel over it.

Members that lie on the accelerator always do; where the message's header says so, those in CPU
memory do too, staged through it. What a rank was asked for by its own ``device=`` decides only how
it sends. Where a group has no device link a codec leaves nothing on the device.

The link goes from accelerator memory to accelerator memory over the user's own group. NCCL has no
tags and no time-out that leaves a group usable, so it carries only what must not pass through the
CPU. Headers, and so every agreement on what follows, stay on the mesh.
"""

from __future__ import annotations  # torch may be built without distributed

import contextlib
import weakref
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from objcomm._codecs.buffers import empty
from objcomm._wire.header import Flag
from objcomm.errors import TransportError, WireError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from objcomm._transport.link import DeviceLink
    from objcomm._wire.message import Message

_STAGED = int(Flag.STAGED)  # an IntFlag's ``&`` costs 0.7 µs


class DevicePath:
    """The device link of one operation, or the lack of one.

    Every method is called by all ranks concerned, for the same messages in the same order.

    Attributes:
        device: where members that stay on the accelerator are received; ``None`` without a link.
        linked: the type of device that the link joins; empty without one.
    """

    def __init__(self, link: DeviceLink | None = None) -> None:
        self._link = link
        self.device = None if link is None else link.device
        self.linked = "" if link is None else link.device.type

    def not_carried(self, message: Message) -> list[torch.Tensor]:
        """Flat tensors of ``message`` that must go over the CPU's link."""
        return [] if self.is_staged(message) else message.following_on_host

    def is_staged(self, message: Message) -> bool:
        """Whether members that lie in CPU memory go over this link, too."""
        return bool(message.header.flags & _STAGED)

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
        """``root``'s bytes into everybody's, in memory of the link's device."""
        with _naming(root):
            self._required().broadcast(flat, root)

    def all_to_all(self, flat: torch.Tensor, into: torch.Tensor) -> None:
        """See ``DeviceLink``."""
        with _naming():
            self._required().all_to_all(flat, into)

    def all_gather(self, flat: torch.Tensor, into: torch.Tensor) -> None:
        """See ``DeviceLink``."""
        with _naming():
            self._required().all_gather(flat, into)

    def _required(self) -> DeviceLink:
        if self._link is None:
            raise WireError("ranks agreed on a device link, which this rank lacks")
        return self._link

    def _carried(self, message: Message) -> Iterator[tuple[torch.Tensor, DeviceLink]]:
        if not message.large:
            return
        flats = (
            message.following_on_host if self.is_staged(message) else []
        ) + message.following_on_device
        for flat in flats:
            if self._link is None:
                raise WireError(
                    f"{message.header.position} sends over a device link, which this rank lacks"
                )
            yield flat, self._link


@contextlib.contextmanager
def _landing(
    flat: torch.Tensor, link: DeviceLink, *, is_sent: bool = False
) -> Iterator[torch.Tensor]:
    """``flat``, or a stand-in for it on the link's device whose content ends in ``flat``."""
    if flat.device.type == link.device.type:
        yield flat
    elif is_sent:
        yield flat.to(link.device)
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


class NcclLink:
    """Tensor collectives of ``group``'s backend for ``device``.

    Nothing in it is particular to CUDA: the tests drive it with CPU tensors.

    Attributes:
        device: where the tensors lie.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        # Weak: objcomm keeps this link by its group, and would never let either go.
        self._group = weakref.ref(group)
        self.device = device

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """See ``DeviceLink``. NCCL's ``wait`` blocks the current stream, not the caller."""
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


def device_link(group: dist.ProcessGroup) -> NcclLink | None:
    """The link over ``group``'s NCCL backend, on this process's current CUDA device.

    Asking costs no GPU memory: no CUDA context is made before a tensor needs one.

    Returns:
        ``None`` where the group has no such backend.
    """
    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda")  # without an index: the current one, at each use
    try:
        backend = group._get_backend(device)  # noqa: SLF001  # torch has no public way to ask
    except RuntimeError:
        return None
    return NcclLink(group, device) if backend.name() == "nccl" else None
