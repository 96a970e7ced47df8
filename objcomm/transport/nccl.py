"""The device link: accelerator memory to accelerator memory over the user's own group.

NCCL has no tags and no time-out that leaves a group usable, so it carries only what must not pass
through the CPU: large members that lie on the accelerator, and any large member where the call
says ``device="cuda"``. Headers, and so every agreement on what follows, stay on the Gloo link.
"""

from __future__ import annotations  # torch may be built without distributed

import weakref

import torch
import torch.distributed as dist


class NcclLink:
    """Tensor collectives of ``group``'s backend for ``device``.

    Nothing in it is particular to CUDA: the tests drive it with CPU tensors over Gloo.

    Attributes:
        device: where the tensors lie.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        # Weak: objcomm keeps this link by its group, and would never let either go.
        self._group = weakref.ref(group)
        self.device = device

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """See ``base.DeviceLink``. NCCL's ``wait`` blocks the current stream, not the caller."""
        self._own().broadcast(flat, root).wait()

    def send(self, flat: torch.Tensor, peer: int) -> None:
        """See ``base.DeviceLink``."""
        self._own().send([flat], peer, 0).wait()

    def recv(self, flat: torch.Tensor, peer: int) -> None:
        """See ``base.DeviceLink``."""
        self._own().recv([flat], peer, 0).wait()

    def all_to_all(self, flat: torch.Tensor, into: torch.Tensor) -> None:
        """See ``base.DeviceLink``."""
        self._own().alltoall_base(into, flat, [], []).wait()

    def all_gather(self, flat: torch.Tensor, into: torch.Tensor) -> None:
        """See ``base.DeviceLink``."""
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
