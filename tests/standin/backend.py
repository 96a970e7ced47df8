"""The backend ``standin`` of torch.distributed, for tensors on the device of that name.

``dist.init_process_group("cpu:gloo,standin:standin")`` makes a ``Group``: Python can write no
backend for torch, but a whole process group, so this one holds Gloo for the CPU as well.

It is as strict as NCCL, but tells what NCCL would hang at or corrupt. A rank's tensors must lie on
one device, contiguous, and be ready on its current stream; all ranks must make the same calls in
the same order; what one rank sends moves once the other is there to receive it. A rank that does
not come is waited for until the group's own time limit. ``Backend.interrupt`` makes a call fail,
stall, or do anything else.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.standin import device

Tensors = torch.Tensor | Sequence[torch.Tensor]

_TEXT_NBYTES = 256  # what a rank says of its call
_OFFER, _ANSWER = 0, 1  # tags


class Interruption(NamedTuple):
    """What is to happen in a call of the backend's.

    Attributes:
        operation: the name of ``Backend``'s method.
        act: called on the calling thread; may raise, wait, or end the process.
        at_wait: whether when the call's work is waited for, and not before anything has moved.
    """

    operation: str
    act: Callable[[], None]
    at_wait: bool


class Backend:
    """What joins the ranks' devices.

    Attributes:
        options: with the time limit, where torch's own backends have it.
        made: the calls so far, oldest first.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self._rank, self._size = rank, size
        # Torch's stub of Gloo lacks what all backends have.
        gloo: Any = functools.partial(dist.ProcessGroupGloo, rank=rank, size=size, timeout=timeout)
        self._words = gloo(dist.PrefixStore("words", store))
        self._bytes = gloo(dist.PrefixStore("bytes", store))
        self.options = self._bytes.options
        self.made: list[str] = []
        self._numbers = itertools.count()
        self._interruptions: list[Interruption] = []
        self._device: torch.device | None = None

    def name(self) -> str:
        """As torch asks for it."""
        return device.NAME

    def rank(self) -> int:
        """This rank's number in the group."""
        return self._rank

    def size(self) -> int:
        """How many ranks there are."""
        return self._size

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._words._set_default_timeout(timeout)
        self._bytes._set_default_timeout(timeout)

    def abort(self) -> None:
        """End what is under way, and the connections."""
        self._words.abort()
        self._bytes.abort()

    def interrupt(
        self, operation: str, act: Callable[[], None], *, at_wait: bool = False
    ) -> Interruption:
        """Have something happen in the next call of an operation, once; see ``Interruption``."""
        interruption = Interruption(operation, act, at_wait)
        self._interruptions.append(interruption)
        return interruption

    # The names and arguments of torch's own backends.

    def broadcast(self, tensor: Tensors, root: Any, *_: object) -> "Work":
        """Everybody gets what ``root`` has."""
        flat, source = _one(tensor), getattr(root, "rootRank", root)
        self._agree("broadcast", flat, f"from {source}", [flat] if source == self._rank else [])
        self._bytes.broadcast(device.content(flat), source).wait()
        return self._work("broadcast", [flat])

    def send(self, tensors: Tensors, peer: int, *_: object) -> "Work":
        """Wait until ``peer`` receives it."""
        flat = _one(tensors)
        own = self._begin("send", flat, f"{self._rank} to {peer}", [flat])
        self._words.send([_packed(own)], peer, _OFFER).wait()
        answer = _packed("")
        self._words.recv([answer], peer, _ANSWER).wait()
        if _text(answer) != own:
            raise RuntimeError(f"this rank sends {own}, but {peer} receives {_text(answer)}")
        self._bytes.send([device.content(flat)], peer, 0).wait()
        return self._work("send", [])

    def recv(self, tensors: Tensors, peer: int, *_: object) -> "Work":
        """Wait until ``peer`` has sent it."""
        flat = _one(tensors)
        own = self._begin("recv", flat, f"{peer} to {self._rank}", [])
        offer = _packed("")
        self._words.recv([offer], peer, _OFFER).wait()
        self._words.send([_packed(own)], peer, _ANSWER).wait()
        if _text(offer) != own:
            raise RuntimeError(f"this rank receives {own}, but {peer} sends {_text(offer)}")
        self._bytes.recv([device.content(flat)], peer, 0).wait()
        return self._work("recv", [flat])

    def alltoall_base(
        self,
        into: torch.Tensor,
        flat: torch.Tensor,
        into_sizes: list[int],
        flat_sizes: list[int],
        *_: object,
    ) -> "Work":
        """Everybody gets an equal part from everybody."""
        if into_sizes or flat_sizes:
            raise NotImplementedError("parts of different sizes")
        self._agree("alltoall_base", flat, f"into {into.numel()}", [flat], into)
        self._bytes.alltoall_base(device.content(into), device.content(flat), [], []).wait()
        return self._work("alltoall_base", [into])

    def _allgather_base(self, into: torch.Tensor, flat: torch.Tensor, *_: object) -> "Work":
        """Everybody gets everything, in rank order."""
        self._agree("_allgather_base", flat, f"into {into.numel()}", [flat], into)
        self._bytes._allgather_base(device.content(into), device.content(flat)).wait()
        return self._work("_allgather_base", [into])

    def _begin(
        self, operation: str, flat: torch.Tensor, what: str, reads: Sequence[torch.Tensor]
    ) -> str:
        """Look at the tensor, and say what this call is."""
        if flat.device.type != device.NAME:
            raise RuntimeError(f"{operation}: a tensor on {flat.device}")
        # NCCL would connect another one by itself, and wait there for ranks that do not.
        self._device = self._device or flat.device
        if flat.device != self._device:
            raise RuntimeError(f"{operation}: a tensor on {flat.device}, after {self._device}")
        if not flat.is_contiguous():
            raise RuntimeError(f"{operation}: a tensor must be contiguous")
        device.launch(f"{device.NAME}::{operation}", reads, [])
        self._happen(operation, at_wait=False)
        what = f"{flat.numel()} of {flat.dtype}, {what}"
        self.made.append(f"{operation}: {what}")
        return what

    def _agree(
        self,
        operation: str,
        flat: torch.Tensor,
        what: str,
        reads: Sequence[torch.Tensor],
        into: torch.Tensor | None = None,
    ) -> None:
        """See that all ranks make this call, and that as the same one of their calls."""
        what = self._begin(operation, flat, what, reads)
        if into is not None and (into.device != flat.device or not into.is_contiguous()):
            raise RuntimeError(f"{operation}: its result must be contiguous on {flat.device}")
        own = f"{operation} (call {next(self._numbers)}): {what}"
        gathered = torch.empty(self._size, _TEXT_NBYTES, dtype=torch.uint8, device="cpu")
        self._words._allgather_base(gathered.flatten(), _packed(own)).wait()
        texts = [_text(each) for each in gathered]
        if set(texts) != {own}:
            raise RuntimeError(f"the ranks make different calls: {texts}")

    def _happen(self, operation: str, *, at_wait: bool) -> None:
        for each in self._interruptions:
            if each.operation == operation and each.at_wait is at_wait:
                self._interruptions.remove(each)
                each.act()
                return

    @functools.cached_property
    def _stream(self) -> device.Stream:
        """On which it moves."""
        return device.Stream(None if self._device is None else self._device.index)

    def _work(self, operation: str, writes: Sequence[torch.Tensor]) -> "Work":
        """What has been written on the backend's own stream, for which others have to wait."""
        own = self._stream
        own.wait_stream(device.current_stream(own.device_index))
        device.launch(f"{device.NAME}::{operation} done", [], writes, own)
        return Work(own, functools.partial(self._happen, operation, at_wait=True))


class Work(dist._Work):
    """One call of the backend's; ``wait`` has the current stream wait, as NCCL's does."""

    def __init__(self, own: device.Stream, happen: Callable[[], None]) -> None:
        super().__init__()
        self._own = own
        self._happen = happen

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002  # torch's signature
        """Nothing queued from now on begins before it has ended."""
        self._happen()
        device.wait_for(self._own)
        return True

    def is_completed(self) -> bool:
        """Whether it has ended: before the call has returned."""
        return True


class Group(dist.ProcessGroup):
    """Ranks that Gloo joins for tensors of the CPU, and ``standin`` for those of its device.

    Attributes:
        standin: the latter.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the one for classes of Python
        self._store = store
        gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore("cpu", store), rank, size, timeout)
        gloo._set_sequence_number_for_group()
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        self.standin = Backend(dist.PrefixStore(device.NAME, store), rank, size, timeout)

    def get_group_store(self) -> dist.Store:
        """Where its ranks have met."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        wanted = dist.BackendConfig(dist.Backend(dist.get_backend_config(self)))
        return [torch.device(each) for each in wanted.get_device_backend_map()]

    def _get_backend(self, of: torch.device) -> Any:
        return self.standin if of.type == device.NAME else super()._get_backend(of)

    def broadcast(self, tensors: Tensors, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]  # torch has several signatures
        """Over the backend of the tensor's device, as all that follow."""
        return self._over(tensors, "broadcast")(tensors, *args, **kwargs)

    def send(self, tensors: Tensors, *args: Any, **kwargs: Any) -> Any:
        """See ``Backend``."""
        return self._over(tensors, "send")(tensors, *args, **kwargs)

    def recv(self, tensors: Tensors, *args: Any, **kwargs: Any) -> Any:
        """See ``Backend``."""
        return self._over(tensors, "recv")(tensors, *args, **kwargs)

    def alltoall_base(self, into: torch.Tensor, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]  # likewise
        """See ``Backend``."""
        return self._over(into, "alltoall_base")(into, *args, **kwargs)

    def _allgather_base(self, into: torch.Tensor, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]  # likewise
        return self._over(into, "_allgather_base")(into, *args, **kwargs)

    def _over(self, tensors: Tensors, operation: str) -> Callable[..., Any]:
        is_here = _one(tensors).device.type == device.NAME
        return getattr(self.standin if is_here else super(), operation)  # type: ignore[no-any-return]


def _one(tensors: Tensors) -> torch.Tensor:
    """Most of torch's calls take a list of one."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    (tensor,) = tensors
    return tensor


def _packed(text: str) -> torch.Tensor:
    """A text in a tensor of always the same size."""
    raw = text.encode().ljust(_TEXT_NBYTES, b"\0")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _text(packed: torch.Tensor) -> str:
    return bytes(packed.tolist()).rstrip(b"\0").decode()


@functools.cache
def set_up() -> None:
    """Make this process know the device, and torch.distributed the backend."""
    device.set_up()
    dist.Backend.register_backend(device.NAME, Group, devices=[device.NAME])
