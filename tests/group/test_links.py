"""Each link against its contract, between real processes."""

import pytest
import torch.distributed as dist

import objcomm
from objcomm.transport.connect import connect
from objcomm.transport.gloo import GlooLink
from objcomm.transport.link import Connections, Deadline
from objcomm.transport.local import LocalLink
from objcomm.transport.rendezvous import MeetingState
from tests.contracts import Death, check_link
from tests.ranks import ranks
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


@pytest.mark.parametrize("step", Death)
@ranks(2, expect_dead={1})
def test_unix_sockets_keep_the_contract_of_links_when_a_peer_dies(step: Death) -> None:
    check_link(local_link, here().rank, here().world_size, step)


def gloo_link(members: tuple[int, ...]) -> Connections:
    """A link of these ranks that no group uses."""
    return _link(members, is_local=False)


def local_link(members: tuple[int, ...]) -> Connections:
    """The same over Unix sockets."""
    return _link(members, is_local=True)


def _link(members: tuple[int, ...], *, is_local: bool) -> Connections:
    store = dist.PrefixStore(
        f"test_links/{members}",
        dist.distributed_c10d._get_default_store(),  # noqa: SLF001  # torch has no public way to ask
    )
    rank = here().rank
    with objcomm.configure(local=is_local):
        link = connect(store, rank, members, Deadline(20), MeetingState(rank, members))
    assert isinstance(link, LocalLink if is_local else GlooLink)
    return link
