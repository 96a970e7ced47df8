"""How many connections to the store a process has, and what happens when one fails.

The store's host looks up the name of each client that connects, which may block all ranks for 5 s.
"""

import gc
import socket
from typing import Any

import pytest
import torch.distributed as dist

import objcomm
from objcomm import DesyncError
from objcomm._failures.watchdog import board_thread_of
from objcomm._transport.sockets import _connections
from tests.group.helpers import assert_group_works, over_tcp
from tests.ranks import ranks
from tests.waits import wait_until
from tests.workers import here


def connections(port: int) -> set[int]:
    """Return the inodes of this process's connections to a port."""
    return {inode for inode, address, _ in _connections() if address[1] == port}


def meet_again(group: Any) -> None:
    """Make the ranks of a group connect again."""
    with pytest.raises(DesyncError):
        (objcomm.barrier if here().rank else objcomm.all_gather)("a name", group=group)
    objcomm.barrier(group=group)


@ranks(3, joined=False)
def test_groups_pairs_and_new_meetings_reuse_the_open_connections() -> None:
    with over_tcp() as port:
        objcomm.barrier()
        before = connections(port)
        groups: list[Any] = [None, *(dist.new_group() for _ in range(3))]
        for group in groups:
            assert_group_works(group)
            if here().rank == 0:
                objcomm.send("to a pair", 1, group=group)
            elif here().rank == 1:
                objcomm.recv(0, group=group)
            meet_again(group)
        assert connections(port) == before  # torch's and objcomm's
        assert len(before) == 2


@ranks(2, joined=False)
def test_gloo_groups_made_one_after_another_share_a_connection() -> None:
    with over_tcp() as port:
        first: Any = objcomm.split(0)
        before = connections(port)
        several: list[Any] = [objcomm.split(0, group=first), objcomm.dup()]
        for group in [first, *several]:
            assert_group_works(group)
        assert connections(port) == before
        assert len(before) == 3  # torch's, objcomm's, one for users' groups


@ranks(2, joined=False)
def test_the_connections_of_a_world_that_was_left_are_closed() -> None:
    with over_tcp() as port:
        objcomm.barrier()
        assert objcomm.all_gather(here().rank, group=objcomm.dup()) == [0, 1]
        assert len(connections(port)) == 3
    wait_until(lambda: gc.collect() >= 0 and len(connections(port)) <= 1, "all but the test's own")


@ranks(2, joined=False)
def test_a_connection_that_broke_while_idle_is_not_reused() -> None:
    with over_tcp():
        objcomm.barrier()
        if here().rank == 0:
            world: Any = dist.group.WORLD
            (ours,) = board_thread_of(world).store._ends  # noqa: SLF001  # nothing public says which it is
            for inode, _, end in _connections():
                if inode == ours:
                    end.shutdown(socket.SHUT_RDWR)
        group: Any = dist.new_group()
        assert_group_works(group)
        meet_again(group)  # its verdict is in the store
