"""Each link against its contract, between real processes."""

import torch.distributed as dist

from objcomm.transport.gloo import GlooLink
from objcomm.transport.link import Connections, Deadline
from objcomm.transport.rendezvous import Progress
from tests.contracts import check_ends, check_transfers
from tests.ranks import ranks
from tests.workers import here


@ranks(2, 3)
def test_gloo_keeps_the_contract_of_links() -> None:
    link = gloo_link()
    check_transfers(link)
    check_ends(link)


def gloo_link() -> Connections:
    """A link of all ranks that no group uses."""
    members, rank = tuple(range(here().world_size)), here().rank
    store = dist.PrefixStore("test_links", dist.distributed_c10d._get_default_store())  # noqa: SLF001  # torch has no public way to ask
    return GlooLink(store, rank, members, Deadline(20), Progress(rank, members))
