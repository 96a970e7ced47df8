"""Connections to a store: who gets which."""

import os
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from objcomm.transport.stores import Clients, bare, loopback_store


@pytest.fixture(params=["tcp", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> dist.Store:
    found: dist.Store = (
        loopback_store() if request.param == "tcp" else dist.FileStore(str(tmp_path / "store"), 1)
    )
    return dist.PrefixStore("part", found)


def test_two_that_need_one_at_once_have_one_each_and_the_next_takes_one_of_these(
    store: dist.Store,
) -> None:
    clients = Clients()
    one, other = clients.take(store, 60.0), clients.take(store, 60.0)
    assert bare(one) is not bare(other)
    one.set("key", "of the store's own part")
    assert store.get("key") == other.get("key")
    clients.give_back(one)
    assert clients.take(store, 60.0) is one


def test_a_forked_child_opens_its_own(store: dist.Store) -> None:
    clients = Clients()
    parents = clients.take(store, 60.0)
    clients.give_back(parents)
    with mock.patch.object(os, "getpid", return_value=-1):
        own = clients.take(store, 60.0)
        assert own is not parents
        clients.give_back(own)
        assert clients.take(store, 60.0) is own


def test_a_store_is_not_kept_alive_by_connections_to_it() -> None:
    hosted = loopback_store()
    clients = Clients()
    own = clients.take(hosted, 60.0)
    del hosted
    with pytest.raises(dist.DistNetworkError):
        own.add("key", 1)
