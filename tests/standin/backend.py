"""The backend ``standin`` of torch.distributed, for tensors on the device of that name.

``dist.init_process_group("cpu:gloo,standin:standin")`` creates a ``Group``: torch takes no backend
that is written in Python, only a whole process group, so this one includes Gloo for the CPU. For a
communicator that torch does not register, objcomm gets the ``Backend`` alone.

It is as strict as NCCL, but raises where NCCL would hang or corrupt data. A rank's tensors must be
on one device, contiguous, and ready on its current stream; all ranks must make the same calls in
the same order; data is sent only once its receiver is there. Like NCCL, it connects ranks at their
first transfer. The backend does not know whether a missing rank is alive: it waits for its timeout
or for a call of ``Backend.abort``. ``Journal.interrupt`` makes a call fail, stall, or do anything
else.
"""

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.standin import device

Tensors = torch.Tensor | Sequence[torch.Tensor]

_LOOK_S = 0.001

_ALL_CAME = "all came"
_GLOO_LIMIT = timedelta(seconds=300)


class Journal:
    """What one process has done over its backends, oldest first, and what is to happen in them.

    Attributes:
        made: the calls.
        communicators: the backends that belong to no group.
    """

    def __init__(self) -> None:
        self.made: list[str] = []
        self.communicators: list[Backend] = []
        self._interruptions: list[tuple[str, Callable[[], object], bool]] = []

    def interrupt(
        self, operation: str, act: Callable[[], object], *, at_wait: bool = False
    ) -> None:
        """Interrupt the next call of an operation, once.

        Args:
            operation: the name of the ``Backend`` method; empty for any.
            act: called on the calling thread; may raise, wait, or end the process.
            at_wait: whether to act when the call's work is waited for, instead of before any
                transfer.
        """
        self._interruptions.append((operation, act, at_wait))

    def act(self, operation: str, *, at_wait: bool) -> None:
        """Do what interrupts a call."""
        for each in self._interruptions:
            name, act, is_at_wait = each
            if name in {"", operation} and is_at_wait is at_wait:
                self._interruptions.remove(each)
                act()
                return


class Backend:
    """The connection of the ranks' devices.

    Attributes:
        options: has the timeout, as in torch's own backends.
        is_aborted: whether ``abort`` was called, and the wait that it ended is over.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        names: Sequence[int] = (),
    ) -> None:
        """Begin without a connection.

        Args:
            store: where the ranks meet.
            rank: this rank.
            size: number of ranks.
            timeout: how long to wait for another rank.
            names: what to call each rank in ``Journal.made``; by default its number.
        """
        self._rank, self._size = rank, size
        self._names = names or range(size)
        self._store = store
        self._announced: Any = store.clone()  # type: ignore[attr-defined]  # not in torch's stub
        self._gloos: dict[str, Any] = {}  # by the ranks that it connects
        self.options = SimpleNamespace(_timeout=timeout)
        self._limit = timeout
        self._aborted = threading.Event()
        self._meeting = threading.Lock()
        self._numbers: Counter[str] = Counter()
        self._device: torch.device | None = None

    def name(self) -> str:
        """Return the name, as torch expects."""
        return device.NAME

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout, with XCCL's name for it."""
        self._limit = timeout

    def abort(self) -> None:
        """End all waits for other ranks, and all later calls."""
        self._aborted.set()

    @property
    def is_aborted(self) -> bool:
        """Whether ``abort`` was called, and the wait that it ended is over."""
        return self._aborted.is_set() and not self._meeting.locked()

    # The names and arguments of torch's own backends.

    def broadcast(self, tensor: Tensors, root: Any, *_: object) -> "Work":
        """Copy ``root``'s tensor to all ranks."""
        flat, source = _one(tensor), getattr(root, "rootRank", root)
        reads = [flat] if source == self._rank else []
        gloo = self._meet("broadcast", flat, f"from {source}", reads)
        gloo.broadcast(device.content(flat), source).wait()
        return self._work("broadcast", [flat])

    def send(self, tensors: Tensors, peer: int, *_: object) -> "Work":
        """Send, once ``peer`` receives."""
        flat = _one(tensors)
        gloo = self._meet("send", flat, self._way(self._rank, peer), [flat], (self._rank, peer))
        gloo.send([device.content(flat)], 1 - gloo.rank(), 0).wait()
        return self._work("send", [])

    def recv(self, tensors: Tensors, peer: int, *_: object) -> "Work":
        """Receive, once ``peer`` sends."""
        flat = _one(tensors)
        gloo = self._meet("recv", flat, self._way(peer, self._rank), [], (peer, self._rank))
        gloo.recv([device.content(flat)], 1 - gloo.rank(), 0).wait()
        return self._work("recv", [flat])

    def alltoall_base(
        self,
        into: torch.Tensor,
        flat: torch.Tensor,
        into_sizes: list[int],
        flat_sizes: list[int],
        *_: object,
    ) -> "Work":
        """Send an equal part from every rank to every rank."""
        if into_sizes or flat_sizes:
            raise NotImplementedError("parts of different sizes")
        gloo = self._meet("alltoall_base", flat, f"into {into.numel()}", [flat], into=into)
        gloo.alltoall_base(device.content(into), device.content(flat), [], []).wait()
        return self._work("alltoall_base", [into])

    def _allgather_base(self, into: torch.Tensor, flat: torch.Tensor, *_: object) -> "Work":
        """Gather all ranks' tensors on all ranks, in rank order."""
        gloo = self._meet("_allgather_base", flat, f"into {into.numel()}", [flat], into=into)
        gloo._allgather_base(device.content(into), device.content(flat)).wait()
        return self._work("_allgather_base", [into])

    def _way(self, src: int, dst: int) -> str:
        return f"{self._names[src]} to {self._names[dst]}"

    def _meet(
        self,
        operation: str,
        flat: torch.Tensor,
        what: str,
        reads: Sequence[torch.Tensor],
        ranks: Sequence[int] = (),
        *,
        into: torch.Tensor | None = None,
    ) -> Any:
        """Check the tensors, and check that all ranks concerned make this call.

        Returns what connects these ranks in CPU memory.

        Args:
            operation: the name of the method.
            flat: the tensor that is sent or received.
            what: the other facts that must be the same on these ranks.
            reads: tensors that must be ready.
            ranks: the ranks concerned; all if empty.
            into: the tensor to receive into, if it is a different one.
        """
        for tensor in (flat,) if into is None else (flat, into):
            if tensor.device.type != device.NAME or not tensor.is_contiguous():
                raise RuntimeError(
                    f"{operation}: a tensor on {tensor.device} with strides {tensor.stride()}; "
                    f"it must be contiguous on {device.NAME}"
                )
            # NCCL would open another connection by itself, and wait there for ranks that do not.
            self._device = self._device or tensor.device
            if tensor.device != self._device:
                raise RuntimeError(f"{operation}: a tensor on {tensor.device}, not {self._device}")
        device.all_devices().launch(f"{device.NAME}::{operation}", reads, [])
        journal().act(operation, at_wait=False)
        with self._meeting:
            what = f"{flat.numel()} of {flat.dtype}, {what}"
            journal().made.append(f"{operation}: {what}")
            whose = "-".join(map(str, sorted(ranks))) or "all"
            own = f"call {self._numbers[whose]} of {whose}: "
            own += what if ranks else f"{operation}, {what}"
            key = f"{whose}/{self._numbers[whose]}"
            self._numbers[whose] += 1
            self._announced.set(f"{key}/{self._rank}", own)
            keys = [f"{key}/{each}" for each in ranks or range(self._size)]
            self._await(keys, own, f"{key}/outcome")
        texts = [self._announced.get(each).decode() for each in keys]
        if set(texts) != {own}:
            raise RuntimeError(f"the ranks make different calls: {texts}")
        if whose not in self._gloos:
            # The ranks have met, so Gloo never waits long. Torch's stub lacks its members.
            order = sorted(ranks or range(self._size))
            own_store = dist.PrefixStore(f"gloo {whose}", self._store)
            place = order.index(self._rank)
            self._gloos[whose] = dist.ProcessGroupGloo(own_store, place, len(order), _GLOO_LIMIT)
        return self._gloos[whose]

    def _await(self, keys: list[str], own: str, outcome: str) -> None:
        """Wait until all ranks have announced their calls.

        A rank that gives up has also announced its call. So the first to know stores the outcome,
        and all follow it: otherwise a rank would wait in Gloo for one that never comes.
        """
        until = time.monotonic() + self._limit.total_seconds()
        reason = ""
        while not reason and (self._aborted.is_set() or not self._announced.check(keys)):
            if self._aborted.wait(_LOOK_S):
                reason = "the communicator was aborted"
            elif time.monotonic() > until:
                reason = f"timed out after {self._limit}"
        stands = self._announced.compare_set(outcome, "", reason or _ALL_CAME).decode()
        if stands != _ALL_CAME:
            raise RuntimeError(f"{reason or stands} in {own}")

    @functools.cached_property
    def _stream(self) -> device.Stream:
        """Return the stream that transfers use."""
        return device.Stream(None if self._device is None else self._device.index)

    def _work(self, operation: str, writes: Sequence[torch.Tensor]) -> "Work":
        """Mark the tensors as written on the backend's stream, so that other streams must wait."""
        own = self._stream
        own.wait_stream(device.current_stream(own.device_index))
        device.all_devices().launch(f"{device.NAME}::{operation} done", [], writes, own)
        return Work(own, functools.partial(journal().act, operation, at_wait=True))


class Work(dist._Work):
    """One call of the backend; ``wait`` makes the current stream wait, like NCCL's."""

    def __init__(self, own: device.Stream, act: Callable[[], None]) -> None:
        super().__init__()
        self._own = own
        self._act = act

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002  # torch's signature
        """Let nothing queued from now on begin before it has ended."""
        self._act()
        device.wait_for(self._own)
        return True

    def is_completed(self) -> bool:
        """Return True: it has ended before the call returned."""
        return True


class Group(dist.ProcessGroup):
    """Ranks connected by Gloo for CPU tensors, and by ``standin`` for those of its device.

    Attributes:
        standin: the backend of the device.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the one for Python classes
        self._store = store
        gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore("cpu", store), rank, size, timeout)
        gloo._set_sequence_number_for_group()
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        self.standin = Backend(dist.PrefixStore(device.NAME, store), rank, size, timeout)

    def get_group_store(self) -> dist.Store:
        """Return the store through which its ranks have met."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        wanted = dist.BackendConfig(dist.Backend(dist.get_backend_config(self)))
        return [torch.device(each) for each in wanted.get_device_backend_map()]

    def _get_backend(self, of: torch.device) -> Any:
        return self.standin if of.type == device.NAME else super()._get_backend(of)

    def broadcast(self, tensors: Tensors, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]  # torch has several signatures
        """Use the backend of the tensor's device, like all methods that follow."""
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
    """Unwrap a tensor: most of torch's calls take a list of one."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    (tensor,) = tensors
    return tensor


def _created(given: Any, _options: object) -> Group | Backend:
    """Create what ``torch.distributed`` or objcomm asks for."""
    place = given.store, given.group_rank, given.group_size, given.timeout
    if not given.group_id.startswith("objcomm "):
        return Group(*place)
    made = Backend(*place, given.global_ranks_in_group)
    journal().communicators.append(made)
    return made


@functools.cache
def journal() -> Journal:
    """Return this process's journal."""
    return Journal()


@functools.cache
def set_up() -> None:
    """Register the device in this process, and the backend in torch.distributed."""
    device.set_up()
    dist.Backend.register_backend(device.NAME, _created, extended_api=True, devices=[device.NAME])
