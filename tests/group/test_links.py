"""Check each link against its contract, between real processes."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
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

GLOO, UNIX, UNIX_LATER = "Gloo", "Unix sockets", "Unix sockets, at first use"
#: Links between hosts, and on which host each rank seems to be.
HOSTS: dict[str, Callable[[int], int]] = {
    "hosts of two ranks": lambda rank: rank // 2,
    "hosts that take turns": lambda rank: rank % 2,
    "hosts that take turns, at first use": lambda rank: rank % 2,
    "a host for each rank": lambda rank: rank,
    "a host for each rank, at first use": lambda rank: rank,
}


def check(name: str, step: Death | None = None) -> None:
    """Check one kind of link; "at first use" ranks meet as many of a host do, in a tree."""
    kind = GlooLink if name == GLOO else StreamLink
    with (
        mock.patch.object(connecting, "_AT_ONCE_MAX", 1) if "first" in name else nullcontext(),
        mock.patch.object(rendezvous, "machine", return_value=f"host{HOSTS[name](here().rank)}")
        if name in HOSTS
        else nullcontext(),
    ):
        check_link(partial(_link, kind), here().rank, here().world_size, step)


@ranks(2, 3)
@pytest.mark.parametrize("name", [GLOO, UNIX])
def test_the_links_of_a_host_keep_the_contract(name: str) -> None:
    check(name)


@ranks(3)
@pytest.mark.parametrize("name", [UNIX_LATER, "hosts of two ranks"])
def test_links_of_three_ranks_keep_the_contract(name: str) -> None:
    check(name)


@ranks(4)
@pytest.mark.parametrize(
    "name", ["hosts of two ranks", "hosts that take turns", "a host for each rank, at first use"]
)
def test_links_between_several_hosts_keep_the_contract(name: str) -> None:
    check(name)


@pytest.mark.parametrize("step", Death)
@pytest.mark.parametrize("name", [GLOO, UNIX])
@ranks(2, expect_dead={1})
def test_the_links_of_a_host_keep_the_contract_when_a_peer_dies(name: str, step: Death) -> None:
    check(name, step)


@pytest.mark.parametrize("step", Death)
@pytest.mark.parametrize("name", [UNIX_LATER, "a host for each rank"])
@ranks(3, expect_dead={1})
def test_links_keep_the_contract_when_one_of_three_ranks_dies(name: str, step: Death) -> None:
    check(name, step)


@pytest.mark.parametrize("step", Death)
@ranks(4, expect_dead={1})
def test_links_keep_the_contract_when_one_of_two_hosts_ranks_dies(step: Death) -> None:
    check("hosts that take turns, at first use", step)


@ranks(3, disposable=True)
def test_links_of_gloo_share_one_thread_which_ends_with_the_last() -> None:
    before = tasks()
    links = [_link(GlooLink, (0, 1, 2))]
    threads = tasks()
    assert len(threads - before) == 1
    links += [_link(GlooLink, (2, 0, 1)), _link(GlooLink, (0, 1, 2))]
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
            return str(error_in(LinkError, lambda: _link(GlooLink, (0, 1))).reason)

    assert "nowhere" in refused("nowhere")
    assert "nowhere" in refused("lo,nowhere")
    with mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME="lo"):
        link = _link(GlooLink, (0, 1))
    assert list(link.closed()) == []
    tell_all("are connected", "")
    link.abort()


def _link(kind: type[Connections], members: tuple[int, ...]) -> Connections:
    """A link of these ranks that no group uses."""
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
