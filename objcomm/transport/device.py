"""Which of a message's large members travel over the device link, and how.

Members that lie on the accelerator always do; with ``device="cuda"`` those in CPU memory do too,
staged through it. Where a group has no device link a codec leaves nothing on the device.
"""

import torch

from objcomm.memory import empty
from objcomm.message import Message
from objcomm.transport.base import DeviceLink


class DevicePath:
    """The device link of one operation, or the lack of one.

    Every method is called by all ranks concerned, for the same messages in the same order.

    Attributes:
        device: where members that stay on the accelerator are received; ``None`` without a link.
    """

    def __init__(
        self,
        link: DeviceLink | None = None,
        *,
        is_staged: bool = False,
    ) -> None:
        """Begin.

        Args:
            link: what carries them.
            is_staged: whether members in CPU memory go this way as well.
        """
        self._link = link
        self._is_staged = is_staged and link is not None
        self.device = None if link is None else link.device

    def not_carried(self, message: Message) -> list[torch.Tensor]:
        """Flat tensors of ``message`` that must go over the CPU's link."""
        return [] if self._is_staged else message.following_on_host

    def send(self, message: Message, peer: int) -> None:
        """This rank's part towards one other."""
        if self._link is not None:
            for flat in self._carried(message):
                self._link.send(flat.to(self._link.device), peer)

    def recv(self, message: Message, peer: int) -> None:
        """One other's part towards this rank, into ``message``'s memory."""
        if self._link is not None:
            for flat in self._carried(message):
                staged = self._landing(flat)
                self._link.recv(staged, peer)
                _land(flat, staged)

    def broadcast(self, message: Message, root: int, *, is_root: bool) -> None:
        """From one rank into all others' memory."""
        if self._link is not None:
            for flat in self._carried(message):
                staged = flat.to(self._link.device) if is_root else self._landing(flat)
                self._link.broadcast(staged, root)
                if not is_root:
                    _land(flat, staged)

    def _carried(self, message: Message) -> list[torch.Tensor]:
        staged = message.following_on_host if self._is_staged else []
        return [*staged, *message.following_on_device]

    def _landing(self, flat: torch.Tensor) -> torch.Tensor:
        is_there = self.device is None or flat.device.type == self.device.type
        return flat if is_there else empty(flat.numel(), self.device)


def _land(flat: torch.Tensor, staged: torch.Tensor) -> None:
    if staged is not flat:
        flat.copy_(staged)
