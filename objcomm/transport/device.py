"""Which of a message's large members travel over the device link, and how.

Members that lie on the accelerator always do; where the message's header says so, those in CPU
memory do too, staged through it. What a rank was asked for by its own ``device=`` decides only how
it sends. Where a group has no device link a codec leaves nothing on the device.
"""

import contextlib
from collections.abc import Iterator

import torch

from objcomm.errors import TransportError, WireError
from objcomm.frames import Flag
from objcomm.memory import empty
from objcomm.message import Message
from objcomm.transport.base import DeviceLink

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
        return [] if message.header.flags & _STAGED else message.following_on_host

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
        """See ``base.DeviceLink``."""
        with _naming():
            self._required().all_to_all(flat, into)

    def all_gather(self, flat: torch.Tensor, into: torch.Tensor) -> None:
        """See ``base.DeviceLink``."""
        with _naming():
            self._required().all_gather(flat, into)

    def _required(self) -> DeviceLink:
        if self._link is None:
            raise WireError("ranks agreed on a device link, which this rank lacks")
        return self._link

    def _carried(self, message: Message) -> Iterator[tuple[torch.Tensor, DeviceLink]]:
        if not message.large:
            return
        is_staged = message.header.flags & _STAGED
        flats = (message.following_on_host if is_staged else []) + message.following_on_device
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
