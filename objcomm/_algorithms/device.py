"""The device links, and which of a message's large members travel over them.

Members in the memory of an accelerator whose device type has a link always use it. If the message's
header says so, members in CPU memory do too, staged through the first link's device. A rank's own
``device=`` only decides how that rank sends. If a group has no link for a device type, codecs leave
no members on such devices.

A link moves data from accelerator memory to accelerator memory, with a backend of the kind that the
group names for the device type, such as NCCL. Such backends have no suitable tags, and no timeout
that leaves them usable, so they carry only data that must not pass through the CPU. Headers, and
with them every agreement on what follows, are sent over the mesh.

Each lane of a mesh has its own communicator, created at its first transfer. So a verdict on the
mesh can abort it: the group's own communicator, which DDP or FSDP may use, is not touched, and the
next mesh has a new one. Lanes cannot mix, although a communicator has one order for all transfers.
It is not split from the group's communicator: a split needs all ranks of the group, and a rank that
died in it would block the group.
"""

from __future__ import annotations  # torch may be built without distributed

import contextlib
import threading
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from objcomm._codecs.buffers import empty
from objcomm._transport.link import LinkClosed, LinkError
from objcomm._transport.threads import AbandonedError, Apart, ThreadPool
from objcomm._wire.header import Flag
from objcomm._world import can_be_created
from objcomm.errors import WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    from objcomm._wire.message import Message

_STAGED = int(Flag.STAGED)  # an IntFlag's ``&`` costs 0.7 µs


# An aborted transfer ends in milliseconds. One that does not is left to its thread, because a call
# must raise within 2 s of a death, which is noticed after 1.75 s at most.
_ABORTED_WITHIN_SECONDS = 0.25


class DevicePath:
    """The device links of one lane: none, or one per device type.

    Transfers are started in ``carry_out``, by all participating ranks, for the same messages in the
    same order.

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
        self._apart = Apart(_ABORTED_WITHIN_SECONDS)
        self._is_abandoned = False

    def carry_out(
        self, transfer: Callable[[DevicePath], None], stream: torch.Stream | None = None
    ) -> None:
        """Run transfers, and return when this rank's device has completed them.

        They run on another thread, because a backend may block its caller in C++ until a peer
        joins, or until it is aborted.

        Args:
            transfer: calls the other methods.
            stream: the stream to use; if None, the caller's current one.

        Raises:
            LinkClosed: the path was abandoned.
            LinkError: this rank's backend has failed.
        """
        accelerator = torch.accelerator.current_accelerator()
        if stream is None and accelerator is not None and accelerator.type in self._links:
            stream = torch.accelerator.current_stream()
        where, has_grad = DevicePlace(stream), torch.is_grad_enabled()
        is_inference = torch.is_inference_mode_enabled()

        def carried() -> None:
            with where, torch.inference_mode(is_inference), torch.set_grad_enabled(has_grad):
                transfer(self)
                # A call that returned earlier could not raise if a peer died, and the program would
                # compute with what an aborted transfer has left in memory. Waits for this stream
                # only.
                where.synchronize()

        try:
            self._apart.do(carried)
        except AbandonedError as error:
            raise LinkClosed(str(error)) from error
        if self._is_abandoned:  # an aborted kernel ends without an error
            raise LinkClosed("the connections were closed during a transfer between devices")

    def abandon(self) -> None:
        """Abort the communicators, and make all calls of ``carry_out`` raise, now and later."""
        self._is_abandoned = True
        self._apart.abandon()
        pool = ThreadPool()
        for link in self._links.values():
            try:
                pool.submit(link.abort)  # waits for kernels to end
            except RuntimeError:  # no more threads, so a caller may be in the transfer itself
                link.abort()
        pool.close()

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
        """Return whether a part of a message with a known body is sent over device links.

        Raises:
            WireError: a part would be, but this rank lacks the link.
        """
        return next(self._carried(message), None) is not None

    def send(self, message: Message, peer: int) -> None:
        """Send this rank's part to one peer."""
        for flat, link in self._carried(message):
            with _naming():
                link.send(flat.to(link.device), peer)

    def recv(self, message: Message, peer: int) -> None:
        """Receive one peer's part into ``message``'s memory."""
        for flat, link in self._carried(message):
            with _naming(), _landing(flat, link) as staged:
                link.recv(staged, peer)

    def broadcast(self, message: Message, root: int, *, is_root: bool) -> None:
        """Send one rank's part into all other ranks' memory."""
        for flat, link in self._carried(message):
            with _naming(), _landing(flat, link, is_sent=is_root) as staged:
                link.broadcast(staged, root)

    def broadcast_flat(self, flat: torch.Tensor, root: int) -> None:
        """Send ``root``'s bytes to all ranks, in memory of a link's device."""
        with _naming():
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
def _naming() -> Iterator[None]:
    """Raise a failure of the backend as a link's error."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise LinkError(str(error)) from error


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

    def abort(self) -> None:
        """End this rank's transfers, those that have begun and later ones; may block."""


class BackendLink:
    """Tensor transfers over a separate backend for a device type: NCCL, XCCL or another.

    Nothing in this class depends on the device type; the tests also run it with CPU tensors.

    Attributes:
        device: where the tensors are; without an index, the current device at each use.
    """

    def __init__(
        self, create: Callable[[], Any], device: torch.device, members: Sequence[int]
    ) -> None:
        """Initialize the link; nothing is created before the first transfer.

        Args:
            create: creates the backend, on this rank alone.
            device: where the tensors are.
            members: the ranks that it connects.
        """
        self.device = device
        self._create = create
        self._members = tuple(members)
        self._backend: Any = None
        self._is_aborted = False
        self._lock = threading.RLock()  # a destructor may abort it at any step

    # ``wait`` makes the current stream, and usually not the caller, wait for the backend's.

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """See ``DeviceLink``."""
        self._own().broadcast(flat, self._members.index(root)).wait()

    def send(self, flat: torch.Tensor, peer: int) -> None:
        """See ``DeviceLink``."""
        self._own().send([flat], self._members.index(peer), 0).wait()

    def recv(self, flat: torch.Tensor, peer: int) -> None:
        """See ``DeviceLink``."""
        self._own().recv([flat], self._members.index(peer), 0).wait()

    def all_to_all(self, flat: torch.Tensor, into: torch.Tensor) -> None:
        """See ``DeviceLink``."""
        self._own().alltoall_base(into, flat, [], []).wait()

    def all_gather(self, flat: torch.Tensor, into: torch.Tensor) -> None:
        """See ``DeviceLink``."""
        self._own()._allgather_base(into, flat).wait()  # noqa: SLF001  # as all_gather_into_tensor

    def abort(self) -> None:
        """See ``DeviceLink``."""
        with self._lock:
            self._is_aborted = True
            backend, self._backend = self._backend, None
        if backend is not None:
            with contextlib.suppress(Exception):  # a backend that cannot be aborted
                backend.abort()

    def _own(self) -> Any:
        with self._lock:  # creating it does not wait for other ranks
            if self._is_aborted:
                raise LinkClosed("the connections were closed before a transfer between devices")
            if self._backend is None:
                self._backend = self._create()
            return self._backend


# Gloo copies device memory to CPU memory first.
_HOST_BACKEND = "gloo"


def linked_devices(group: dist.ProcessGroup) -> dict[torch.device, str]:
    """Return the device types that can have a link, each with the name of its backend.

    These are the types for which ``group`` has a dedicated backend of a kind that objcomm can
    create.

    A backend that also serves CPU memory does not count, such as the single one that
    ``init_process_group("gloo")`` creates for all devices. Gloo would move CUDA tensors through CPU
    memory. objcomm's own connections do the same, and also notice when a rank dies and keep their
    timeouts. This function only inspects the group: it allocates no device memory and starts
    nothing on a device.

    Returns:
        Names by device (without index), sorted by type, so that all ranks have the same order.
    """
    named: dict[str, str] = {}
    for device in group._device_types:  # noqa: SLF001  # torch has no public way to ask
        named[device.type] = _backend_name(group, device)
    found = [each for each in own_types(named) if can_be_created(named[each])]
    return {torch.device(each): named[each] for each in found}


def own_types(named: Mapping[str, str]) -> list[str]:
    """Return, sorted, the device types whose backend does not serve CPU memory.

    Args:
        named: backend names by device type; an empty name if there is no backend.
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


class DevicePlace:
    """A context manager that sets device and stream on another thread, usually to the caller's.

    Both belong to the accelerator that torch's generic functions use.
    """

    def __init__(self, stream: torch.Stream | None = None) -> None:
        """Remember a stream and its device.

        Args:
            stream: the stream; if None, the calling thread's current stream and device.
        """
        self._stream = stream
        self._before: torch.Stream | None = None
        self._device: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        accelerator = torch.accelerator.current_accelerator()
        if stream is None and accelerator is not None:
            # Raised if the device's module is not imported, or lacks a driver or the attribute.
            with contextlib.suppress(AttributeError, RuntimeError):
                module: Any = torch.get_device_module(accelerator)
                # Before its first use, no data is on the device, and asking for the stream would
                # initialize it. A module without is_initialized needs no initialization.
                if getattr(module, "is_initialized", _is_ready)():
                    self._stream = torch.accelerator.current_stream()

    def __enter__(self) -> None:
        if self._stream is None:
            return
        # On exit, this does not create a context on the previous device if that has none.
        self._device = torch.accelerator.device_index(self._stream.device_index)
        self._device.__enter__()
        self._before = torch.accelerator.current_stream(self._stream.device_index)
        torch.accelerator.set_stream(self._stream)

    def synchronize(self) -> None:
        """Wait until the device has completed the stream's work, if there is a stream."""
        if self._stream is not None:
            self._stream.synchronize()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._before is not None:
            torch.accelerator.set_stream(self._before)
            self._before = None
            self._device.__exit__(kind, error, traceback)


def stream_beside(*, after_current: bool) -> torch.Stream | None:
    """Create a stream on the current device for work that the current stream does not wait for.

    Args:
        after_current: whether work on the new stream starts after all work that is queued on the
            current stream now.

    Returns:
        The stream; None if torch has no accelerator, or one without streams.
    """
    accelerator = torch.accelerator.current_accelerator()
    try:
        module = None if accelerator is None else torch.get_device_module(accelerator)
    except RuntimeError:
        module = None
    make: Callable[[], torch.Stream] | None = getattr(module, "Stream", None)
    if make is None:
        return None
    stream = make()
    if after_current:
        stream.wait_stream(torch.accelerator.current_stream())
    return stream


def _is_ready() -> bool:
    return True
