"""Which types of device have a link, and which buffer takes which of several links."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from objcomm import WireError
from objcomm._algorithms.device import DevicePath, linked_devices
from objcomm._codecs.buffers import Buffer, BufferKind
from objcomm._transport.link import LinkClosed
from objcomm._wire.header import Flag, Header
from objcomm._wire.message import Message, compose, open_body
from tests.waits import PATIENCE_S

LARGE_NBYTES = 100_000


class NamedGroup:
    """A process group that names its backends, as torch's do."""

    def __init__(self, **names: str | None) -> None:
        self._names = names
        self._device_types = [torch.device(each) for each in names]

    def _get_backend(self, device: torch.device) -> Any:
        name = self._names[device.type]
        if name is None:
            raise RuntimeError("no backend for this type of device")
        return SimpleNamespace(name=lambda: name) if name else Unnamed()


class Unnamed:
    """A backend of another library that does not report its name."""

    def name(self) -> str:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("named", "joined"),
    [
        ({"cuda": "nccl"}, ["cuda"]),
        ({"cpu": "gloo", "cuda": "nccl"}, ["cuda"]),
        ({"cpu": "gloo", "xpu": "xccl", "cuda": "nccl"}, ["cuda", "xpu"]),
        ({"cpu": "gloo", "hpu": "hccl"}, ["hpu"]),
        ({"cpu": "gloo", "cuda": "gloo"}, []),
        ({"cuda": "gloo"}, []),
        ({"cpu": "mpi", "cuda": "mpi"}, []),
        ({"cpu": "gloo", "cuda": "mpi"}, []),  # torch has one communicator of it in a process
        ({"cpu": "gloo", "xpu": None}, []),
        ({"cpu": "gloo", "xpu": "", "hpu": "another"}, []),  # neither can be created again
        ({"cpu": "gloo"}, []),
    ],
)
def test_a_type_of_device_with_its_own_backend_has_a_link(
    named: dict[str, str | None], joined: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(dist.Backend._plugins, "HCCL", None)  # noqa: SLF001  # as its library does
    group: Any = NamedGroup(**named)
    assert list(linked_devices(group)) == [torch.device(each) for each in joined]


class NotingLink:
    """A link that notes what it was given."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.sent: list[torch.Tensor] = []

    def send(self, flat: torch.Tensor, peer: int) -> None:
        del peer
        self.sent.append(flat)

    def abort(self) -> None:
        """End nothing."""


def message_on(*devices: str, flags: int = 0) -> Message:
    """Return a message with a large buffer on each of these devices, and one in CPU memory."""
    flats = [torch.empty(LARGE_NBYTES, dtype=torch.uint8, device=each) for each in devices]
    host = torch.empty(LARGE_NBYTES, dtype=torch.uint8)
    buffers = [Buffer(BufferKind.DEVICE, flat, flat) for flat in flats]
    buffers.append(Buffer(BufferKind.TENSOR, host, host))
    return compose(Header(flags=flags), b"", buffers, device_types="cpu,meta")


def test_each_member_takes_the_link_of_its_own_type() -> None:
    # Neither is an accelerator, but these two types of device always exist.
    links: Any = [NotingLink("cpu"), NotingLink("meta")]
    path = DevicePath(links)
    assert (path.linked, path.staging) == ("cpu,meta", "cpu")
    path.send(message_on("meta", "cpu", "meta"), 1)
    assert [len(link.sent) for link in links] == [1, 2]
    path.send(message_on("meta", flags=Flag.STAGED), 1)
    assert [len(link.sent) for link in links] == [2, 3]
    assert {flat.device.type for flat in links[1].sent} == {"meta"}
    with pytest.raises(WireError, match="a device link, which this rank lacks"):
        DevicePath(links[:1]).send(message_on("meta"), 1)


class StuckLink(NotingLink):
    """A link whose transfers end when they are aborted, without an error, as NCCL's kernels do."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.has_begun, self.is_over = threading.Event(), threading.Event()

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        del flat, root
        self.has_begun.set()
        assert self.is_over.wait(PATIENCE_S)

    def abort(self) -> None:
        self.is_over.set()


def test_an_aborted_transfer_has_no_result() -> None:
    link: Any = StuckLink()
    path = DevicePath([link])

    def abandon() -> None:
        assert link.has_begun.wait(PATIENCE_S)
        path.abandon()

    thread = threading.Thread(target=abandon)
    thread.start()
    for _ in range(2):  # and none begins later
        with pytest.raises(LinkClosed):
            path.carry_out(lambda each: each.broadcast_flat(torch.ones(1), 0))
    thread.join(PATIENCE_S)
    assert link.is_over.is_set()


def test_a_type_is_used_only_if_all_ranks_agree() -> None:
    links: Any = [NotingLink("cpu"), NotingLink("meta")]
    path = DevicePath(links)
    assert path.joined("meta", path.linked) == torch.device("meta")
    assert path.joined("xpu", path.linked) is None
    assert path.joined("meta", "") is None  # other ranks have other links
    assert DevicePath().joined("cpu", "cpu") is None


@pytest.mark.parametrize("nbytes", [10, LARGE_NBYTES])
def test_the_size_table_has_the_type_of_each_member(nbytes: int) -> None:
    flats = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2)]
    if nbytes == LARGE_NBYTES:
        flats[1] = flats[1].to("meta")
    buffers = [Buffer(BufferKind.DEVICE, flat, flat) for flat in flats]
    message = compose(Header(), b"", buffers, device_types="cpu,meta")
    received = Message(message.header, message.body)
    open_body(received, [torch.device("cpu"), torch.device("meta")])
    assert [each.flat.device for each in received.buffers] == [flat.device for flat in flats]
    lacking = Message(message.header, message.body)
    with pytest.raises(WireError, match="cannot be received here"):
        open_body(lacking, [])


def test_a_member_on_a_type_of_device_without_a_link_is_refused() -> None:
    flat = torch.empty(10, dtype=torch.uint8, device="meta")
    with pytest.raises(WireError, match="a buffer on 'meta' cannot be sent from there"):
        compose(Header(), b"", [Buffer(BufferKind.DEVICE, flat, flat)], device_types="cuda")
