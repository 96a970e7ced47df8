"""Memory that a link over streams hands over, and what it sends or refuses instead."""

import errno
import fcntl
import gc
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import cast

import pytest
import torch

from objcomm._transport.frames import Kind
from objcomm._transport.link import LinkClosed
from objcomm._transport.share import Share, places
from objcomm._transport.streams import StreamLink
from tests.contracts import is_over
from tests.open_files import open_files
from tests.scripts import run_python
from tests.unit.stream_links import (
    LIMIT,
    TAG,
    Refusing,
    facing,
    filled,
    frame,
    joined,
    members,
    take_a_copy,
)


def sent_as_copy(
    sender: StreamLink, receiver: StreamLink, share: Share | None, flats: list[torch.Tensor]
) -> None:
    """Check that the receiver gets a copy of what was to be shared."""
    sent = sender.send_share(share, flats, 1, TAG)
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(sender.wait, sent, LIMIT)
        take_a_copy(receiver, flats)
        sending.result()


def test_shared_memory_is_mapped_and_its_sender_informed() -> None:
    flats = members(100_000, 5)
    with joined() as (sender, receiver):
        sent = sender.send_share(Share.of(flats), flats, 1, TAG)
        assert not is_over(sender, sent)
        borrowed = receiver.recv_share(100_005, 0, TAG)
        receiver.wait(borrowed, LIMIT)
        sender.wait(sent, LIMIT)
        assert borrowed.share is not None
        for flat, place in zip(flats, places([100_000, 5]), strict=True):
            memory = borrowed.share.mapped(place, flat.numel())
            assert torch.equal(torch.frombuffer(memory, dtype=torch.uint8), flat)


@pytest.mark.parametrize("lengths", [(9,), (100_000, 1, 5_000_000), (0, 3, 0, 0, 200_000, 0)])
def test_memory_that_cannot_be_shared_is_sent(lengths: tuple[int, ...]) -> None:
    with joined() as (sender, receiver):
        sent_as_copy(sender, receiver, None, members(*lengths))


def test_if_too_many_descriptors_are_in_transit_the_content_is_sent() -> None:
    flats = members(100_000, 5)
    with joined() as (sender, receiver):
        (connection,) = sender._connections.values()  # noqa: SLF001  # no public way to the socket
        refusing = Refusing(connection.socket, errno.ETOOMANYREFS, is_of_descriptors=True)
        connection.socket = cast("socket.socket", refusing)
        sent_as_copy(sender, receiver, Share.of(flats), flats)


def test_if_the_receiver_has_no_descriptor_left_the_content_is_sent() -> None:
    run_python(
        """
        import resource
        from concurrent.futures import ThreadPoolExecutor
        from objcomm._transport.share import Share
        from tests.open_files import open_files
        from tests.unit.stream_links import LIMIT, TAG, joined, members, take_a_copy
        flats = members(100_000, 5)
        with joined() as (sender, receiver), ThreadPoolExecutor(1) as threads:
            threads.submit(int).result()
            sent = sender.send_share(Share.of(flats), flats, 1, TAG)
            files = open_files()
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, 4096))
            sending = threads.submit(sender.wait, sent, LIMIT)
            take_a_copy(receiver, flats)
            sending.result()
            resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
            assert open_files() <= files
        """
    )


@pytest.mark.parametrize(
    ("kind", "nbytes", "are_sealed"),
    [
        pytest.param(Kind.SHARE, 8, [False], id="memory that may change"),
        pytest.param(Kind.SHARE, 9, [True], id="another length"),
        pytest.param(Kind.SHARE, 8, [False, True], id="memory of which a part may change"),
        pytest.param(Kind.OFFER, 8, [True], id="an offer with a descriptor"),
    ],
)
def test_an_invalid_share_ends_the_connection_and_leaves_no_file(
    kind: Kind, nbytes: int, are_sealed: list[bool]
) -> None:
    gc.collect()
    files = open_files()
    with facing() as (link, other):
        pending = link.recv_share(8, 1, TAG)
        sealed, unsealed = Share.of(members(8)), Share([os.memfd_create("objcomm")])
        os.ftruncate(unsealed.descriptors[0], 4096)
        mine = [(sealed if each else unsealed).descriptors[0] for each in are_sealed]
        socket.send_fds(other, [frame(kind, nbytes=nbytes, number=1)], mine)
        sealed.close()
        unsealed.close()
        with suppress(LinkClosed):
            link.wait(pending, LIMIT)
        with pytest.raises(LinkClosed, match="which objcomm never does"):
            link.send(filled(1), 1, TAG)
    del link, other, pending
    gc.collect()
    assert open_files() == files


def test_a_file_is_judged_when_its_frame_is_whole() -> None:
    """The sender may shrink it before it is sealed, which would kill a process that maps it."""
    file = os.memfd_create("objcomm", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, 2 << 20)
    said = frame(Kind.SHARE, nbytes=2 << 20, number=1)
    with facing() as (link, other):
        borrowed = link.recv_share(2 << 20, 1, TAG)
        socket.send_fds(other, [said[:1]], [file])
        link.move()
        os.ftruncate(file, 4096)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, 1 | 2 | 4 | 8)
        os.close(file)
        other.sendall(said[1:])
        link.wait(borrowed, LIMIT)
        assert borrowed.share is not None
        with pytest.raises(ValueError, match="of 4096"):
            borrowed.share.mapped((0, 0), 2 << 20)


def memories() -> int:
    """Return how many descriptors of shared memory this process has."""
    return sum("memfd" in str(each.resolve()) for each in Path("/proc/self/fd").iterdir())


def test_an_end_releases_memory_that_no_rank_has_taken() -> None:
    gc.collect()
    files, before = open_files(), memories()
    flats = members(100_000)
    with joined() as (sender, receiver):
        sent = [sender.send_share(Share.of(flats), flats, 1, TAG) for _ in range(3)]
        for _ in sent:  # each move takes one
            receiver.move()
        assert memories() == before + 6
        borrowed = receiver.recv_share(100_000, 0, TAG)
        sender.abort()
        receiver.wait(borrowed, LIMIT)  # it had arrived
        for each in sent[1:]:
            with pytest.raises(LinkClosed):
                sender.wait(each, LIMIT)
        receiver.move()  # it notices the end
        del sent, each
        gc.collect()
        assert memories() == before + 1  # the taken memory, though both links still exist
    del sender, receiver, borrowed
    gc.collect()
    assert open_files() == files
