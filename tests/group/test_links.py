"""Each link against its contract, between real processes."""

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
from objcomm._transport.link import Connections, Deadline, LinkError, payload_tag
from objcomm._transport.local import LocalLink
from objcomm._transport.mixed import MixedLink
from objcomm._transport.rendezvous import MeetingState
from tests.contracts import Death, check_link
from tests.group.helpers import tell_all
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
def test_a_link_of_both_keeps_the_contract_of_links() -> None:
    check_link(mixed_link, here().rank, here().world_size)


@ranks(4)
def test_a_link_of_both_keeps_it_between_hosts_that_take_turns() -> None:
    check_link(lambda members: mixed_link(members, hosts=2), here().rank, 4)


@pytest.mark.parametrize("step", Death)
@ranks(3, expect_dead={1})
def test_a_link_of_both_keeps_the_contract_of_links_when_a_peer_dies(step: Death) -> None:
    check_link(mixed_link, here().rank, here().world_size, step)


@pytest.mark.parametrize("step", Death)
@ranks(4, expect_dead={1})
def test_a_link_of_both_keeps_it_when_a_peer_on_another_host_dies(step: Death) -> None:
    check_link(lambda members: mixed_link(members, hosts=2), here().rank, 4, step)


@ranks(3)
def test_who_waits_for_another_host_moves_what_is_under_way_on_its_own() -> None:
    link = mixed_link((0, 1, 2))
    large, tag = torch.ones(30 << 20, dtype=torch.uint8), payload_tag(0, 5)
    word = torch.zeros(1, dtype=torch.uint8)
    if here().rank == 0:  # waits for rank 2 alone, which waits for rank 1
        sent = link.send(large, 1, tag)
        link.wait(link.recv(word, 2, tag), timedelta(seconds=PATIENCE_S))
        link.wait(sent, timedelta(seconds=PATIENCE_S))
    elif here().rank == 1:
        room = torch.zeros_like(large)
        link.wait(link.recv(room, 0, tag), timedelta(seconds=PATIENCE_S))
        assert torch.equal(room, large)
        link.wait(link.send(word, 2, tag), timedelta(seconds=PATIENCE_S))
    else:
        link.wait(link.recv(word, 1, tag), timedelta(seconds=PATIENCE_S))
        link.wait(link.send(word, 0, tag), timedelta(seconds=PATIENCE_S))
    link.abort()


@ranks(3, disposable=True)
def test_links_of_gloo_share_one_thread_which_goes_with_the_last() -> None:
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
    wait_until(lambda: not threads & tasks() - before, "the thread to go")


def tasks() -> set[str]:
    """This process's threads, those of torch included."""
    return {each.name for each in Path("/proc/self/task").iterdir()}


@ranks(2)
def test_gloo_is_given_the_interface_that_the_user_names() -> None:
    def refused(interface: str) -> str:
        with (
            mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME=interface),
            pytest.raises(LinkError) as error,
        ):
            gloo_link((0, 1))
        return error.value.reason

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
    return _link(members, LocalLink)


def in_a_tree() -> AbstractContextManager[object]:
    """A block in which few ranks of a host meet as many do: the others connect at first use."""
    return mock.patch.object(connecting, "_AT_ONCE_MAX", 1)


def mixed_link(members: tuple[int, ...], hosts: int = 0) -> Connections:
    """The same, as if every third rank were on another host, or so many hosts took turns."""
    host = here().rank % hosts if hosts else here().rank // 2
    beside = [each for each in members if (each % hosts if hosts else each // 2) == host]
    kind: type[Connections] = MixedLink
    if len(beside) in {1, len(members)}:
        kind = GlooLink if len(beside) == 1 else LocalLink
    with mock.patch.object(rendezvous, "machine", return_value=f"host{host}"):
        return _link(members, kind)


def _link(members: tuple[int, ...], kind: type[Connections]) -> Connections:
    store = dist.PrefixStore(
        f"test_links/{members}",
        dist.distributed_c10d._get_default_store(),  # noqa: SLF001  # torch has no public way to ask
    )
    rank = here().rank
    with objcomm.configure(local=kind is not GlooLink):
        link = connect(store, rank, members, Deadline(20), MeetingState(rank, members))
    assert type(link) is kind
    return link
