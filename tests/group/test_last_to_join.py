"""No rank continues while another may still be connecting."""

import os
from typing import Any
from unittest import mock

import objcomm
from objcomm._bootstrap import init
from objcomm._transport.rendezvous import await_all
from tests.group.helpers import assert_group_works, hear, is_said, say, shared_port
from tests.ranks import ranks
from tests.workers import here


@ranks(2, joined=False)
def test_init_returns_when_all_ranks_have_connected() -> None:
    rank = here().rank
    connect = init._connect  # noqa: SLF001  # runs while the ranks connect

    def connect_slowly(limit: Any) -> None:
        connect(limit)
        hear("the first rank is done")
        say("the second rank is done")

    def tell_and_await(*arguments: Any) -> None:
        say("the first rank is done")
        await_all(*arguments)

    place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(shared_port()))
    with (
        mock.patch.object(init, "_connect", connect_slowly)
        if rank == 1
        else mock.patch.object(init, "await_all", tell_and_await)
    ):
        objcomm.init()
    assert is_said("the second rank is done")
    assert_group_works()
