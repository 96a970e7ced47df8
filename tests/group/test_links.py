"""Check each link against its contract, between real processes."""

import os
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm._transport import connect as connecting
from objcomm._transport import rendezvous
from objcomm._transport.connect import connect
from objcomm._transport.gloo import GlooLink
from objcomm._transport.link import Connections, Deadline, LinkError
from objcomm._transport.rendezvous import MeetingState
from objcomm._transport.store import Clients, SharedStore, StorePart
from objcomm._transport.streams import StreamLink
from tests.contracts import Death, check_link
from tests.group.helpers import error_in, tell_all
from tests.ranks import ranks
from tests.waits import PATIENCE_S, wait_until
from tests.workers import here


@ranks(2, 3)
def test_gloo_keeps_the_contract_of_links() -> None:
    check_link(gloo_link, here().rank, here().world_size)


@pytest.mark.parametrize("step", Death)
@ranks(2, expect_dead={1})
def test_gloo_keeps_the_contract_of_links_when_a_peer_dies(step: Death) -> None:
    check_link(gloo_link, here().rank, here().world_size, step)


@ranks(2, 3)
def test_unix_sockets_keep_the_contract_of_links() -> None:
    check_link(local_link, here().rank, here().world_size)


@ranks(3)
def test_unix_sockets_that_connect_at_first_use_keep_the_contract_of_links() -> None:
    with in_a_tree():
        check_link(local_link, here().rank, here().world_size)


@pytest.mark.parametrize("step", Death)
@ranks(3, expect_dead={1})
def test_unix_sockets_keep_it_when_a_peer_dies_that_was_connected_at_first_use(step: Death) -> None:
    with in_a_tree():
        check_link(local_link, here().rank, here().world_size, step)


@pytest.mark.parametrize("step", Death)
@ranks(2, expect_dead={1})
def test_unix_sockets_keep_the_contract_of_links_when_a_peer_dies(step: Death) -> None:
    check_link(local_link, here().rank, here().world_size, step)


@ranks(3, 4)
def test_streams_between_hosts_keep_the_contract_of_links() -> None:
    check_link(far_link, here().rank, here().world_size)


@ranks(4)
def test_streams_keep_it_between_hosts_that_take_turns() -> None:
    check_link(lambda members: far_link(members, hosts=2), here().rank, 4)


@ranks(4)
def test_streams_between_hosts_that_connect_at_first_use_keep_the_contract_of_links() -> None:
    with in_a_tree():
        check_link(lambda members: far_link(members, hosts=4), here().rank, 4)


@pytest.mark.parametrize("step", Death)
@ranks(3, expect_dead={1})
def test_streams_keep_the_contract_of_links_when_a_peer_on_another_host_dies(step: Death) -> None:
    check_link(lambda members: far_link(members, hosts=3), here().rank, 3, step)


@pytest.mark.parametrize("step", Death)
@ranks(4, expect_dead={1})
def test_streams_keep_it_when_a_peer_dies_that_was_connected_at_first_use(step: Death) -> None:
    with in_a_tree():
        check_link(lambda members: far_link(members, hosts=2), here().rank, 4, step)


@ranks(3, disposable=True)
def test_links_of_gloo_share_one_thread_which_ends_with_the_last() -> None:
    before = tasks()
    links = [gloo_link((0, 1, 2))]
    threads = tasks()
    assert len(threads - before) == 1
    links += [gloo_link((2, 0, 1)), gloo_link((0, 1, 2))]
    assert tasks() - threads == set()
    first, *others = links
    first.abort()
    del first, links[0]
    peers = {0, 1, 2} - {here().rank}
    for link in others:
        assert list(link.closed()) == []
        mine = torch.tensor([here().rank], dtype=torch.uint8)
        sent = [link.send(mine, peer, 5) for peer in peers]
        for peer in peers:
            word = torch.zeros(1, dtype=torch.uint8)
            link.wait(link.recv(word, peer, 5), timedelta(seconds=PATIENCE_S))
            assert word.item() == peer
        for each in sent:
            link.wait(each, timedelta(seconds=PATIENCE_S))
    tell_all("have moved all", "")
    for link in others:
        link.abort()
    del link, others, links, sent, each
    wait_until(lambda: not threads & tasks() - before, "the thread to end")


def tasks() -> set[str]:
    """This process's threads, those of torch included."""
    return {each.name for each in Path("/proc/self/task").iterdir()}


@ranks(2)
def test_gloo_uses_the_interface_that_the_user_names() -> None:
    def refused(interface: str) -> str:
        with mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME=interface):
            return str(error_in(LinkError, lambda: gloo_link((0, 1))).reason)

    assert "nowhere" in refused("nowhere")
    assert "nowhere" in refused("lo,nowhere")
    with mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME="lo"):
        link = gloo_link((0, 1))
    assert list(link.closed()) == []
    tell_all("are connected", "")
    link.abort()


def gloo_link(members: tuple[int, ...]) -> Connections:
    """A link of these ranks that no group uses."""
    return _link(members, GlooLink)


def local_link(members: tuple[int, ...]) -> Connections:
    """The same over Unix sockets."""
    return _link(members, StreamLink)


def in_a_tree() -> AbstractContextManager[object]:
    """Make a few ranks of a host meet as many would: the other pairs connect at first use."""
    return mock.patch.object(connecting, "_AT_ONCE_MAX", 1)


def far_link(members: tuple[int, ...], hosts: int = 0) -> Connections:
    """The same, as if each host had two ranks, or as if ranks alternated among `hosts` hosts."""
    host = here().rank % hosts if hosts else here().rank // 2
    with mock.patch.object(rendezvous, "machine", return_value=f"host{host}"):
        return _link(members, StreamLink)


def _link(members: tuple[int, ...], kind: type[Connections]) -> Connections:
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001  # torch has no public way to query it
    shared = SharedStore()
    shared.open(store, 60.0)
    part, lent = StorePart(shared, f"test_links/{members}"), Clients().lent(store, 60.0)
    rank = here().rank
    with objcomm.configure(transport="gloo" if kind is GlooLink else "streams"):
        meeting = MeetingState(rank, members)
        link = connect(
            part, lent, rank, members, Deadline(PATIENCE_S), meeting, None, print, print, print
        )
    assert type(link) is kind
    return link
