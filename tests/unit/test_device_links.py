"""Which types of device have a link, and which buffer takes which of several links."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from objcomm import WireError
from objcomm._algorithms.device import DevicePath, device_links
from objcomm._codecs.buffers import Buffer, BufferKind
from objcomm._wire.header import Flag, Header
from objcomm._wire.message import Message, compose, open_body

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
        ({"cpu": "gloo", "cuda": "mpi"}, ["cuda"]),
        ({"cpu": "gloo", "xpu": None}, []),
        ({"cpu": "gloo"}, []),
    ],
)
def test_a_type_of_device_with_a_backend_of_its_own_has_a_link(
    named: dict[str, str | None], joined: list[str]
) -> None:
    group: Any = NamedGroup(**named)
    links = device_links(group)
    assert [link.device for link in links] == [torch.device(each) for each in joined]


def test_messages_take_a_link_whose_backend_keeps_them_apart_from_collectives() -> None:
    group: Any = NamedGroup(cpu="gloo", cuda="nccl", xpu="xccl", hpu="hccl")
    are_pairwise = {link.device.type: link.is_pairwise for link in device_links(group)}
    assert are_pairwise == {"cuda": True, "hpu": False, "xpu": True}
    group.bound_device_id = torch.device("cuda:0")
    assert not any(link.is_pairwise for link in device_links(group))


def test_a_backend_without_a_name_counts() -> None:
    group: Any = NamedGroup(cpu="gloo", xpu="")
    assert [link.device.type for link in device_links(group)] == ["xpu"]


def test_torchs_own_gloo_group_has_none(tmp_path: Any) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        group: Any = dist.group.WORLD
        assert device_links(group) == []
    finally:
        dist.destroy_process_group()


class NotingLink:
    """A link that notes what it was given."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.sent: list[torch.Tensor] = []

    def send(self, flat: torch.Tensor, peer: int) -> None:
        del peer
        self.sent.append(flat)


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


def test_a_type_is_joined_only_where_all_ranks_agree() -> None:
    links: Any = [NotingLink("cpu"), NotingLink("meta")]
    path = DevicePath(links)
    assert path.joined("meta", path.linked) == torch.device("meta")
    assert path.joined("xpu", path.linked) is None
    assert path.joined("meta", "") is None  # other ranks have other links
    assert DevicePath().joined("cpu", "cpu") is None


@pytest.mark.parametrize("nbytes", [10, LARGE_NBYTES])
def test_the_size_table_tells_the_type_of_each_member(nbytes: int) -> None:
    devices = ["cpu", "meta"]
    flats = [torch.zeros(nbytes, dtype=torch.uint8) for _ in devices]
    if nbytes == LARGE_NBYTES:
        flats[1] = flats[1].to("meta")
    buffers = [Buffer(BufferKind.DEVICE, flat, flat) for flat in flats]
    message = compose(Header(), b"", buffers, device_types="cpu,meta")
    received = Message(message.header, message.body)
    open_body(received, [torch.device(each) for each in devices])
    assert [each.flat.device.type for each in received.buffers] == [
        each.flat.device.type for each in buffers
    ]
    lacking = Message(message.header, message.body)
    with pytest.raises(WireError, match="cannot be received here"):
        open_body(lacking, [])


def test_a_member_on_a_type_without_a_link_is_not_sent_from_there() -> None:
    flat = torch.empty(10, dtype=torch.uint8, device="meta")
    with pytest.raises(WireError, match="a buffer on 'meta' cannot be sent from there"):
        compose(Header(), b"", [Buffer(BufferKind.DEVICE, flat, flat)], device_types="cuda")
