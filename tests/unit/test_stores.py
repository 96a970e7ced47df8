"""Connections to a store, and which thread gets which."""

import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import cast
from unittest import mock

import pytest
import torch.distributed as dist

from objcomm._transport.sockets import hang_up, open_sockets, other_ends
from objcomm._transport.store import Clients, UntilLost, loopback_store, read
from objcomm._world import bare


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


def test_what_stands_under_a_key_is_read_and_nothing_is_written(store: dist.Store) -> None:
    assert read(store, "key") is None
    assert not store.check(["key"])
    for value in (b"", b"\0 \xff", bytes(100_000)):
        store.set("key", value)  # type: ignore[arg-type]  # torch's stub leaves bytes out
        assert read(store, "key") == value
        assert store.get("key") == value


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


@pytest.mark.parametrize("is_kept", [True, False])
def test_who_connects_anew_to_a_store_whose_host_is_gone_is_told_at_once(*, is_kept: bool) -> None:
    """Torch keeps trying until the store's own limit has passed, and longer."""
    hosted, clients = loopback_store(), Clients()
    store = hosted.clone()  # type: ignore[attr-defined]  # torch's stubs leave it out
    store.set_timeout(timedelta(seconds=3))
    own = clients.take(store, 60.0)
    if is_kept:
        clients.give_back(own)
    del hosted
    with pytest.raises(dist.DistNetworkError, match="Connection refused"):
        clients.take(store, 60.0)


def test_after_an_outage_there_is_a_new_connection() -> None:
    hosted, clients = loopback_store(), Clients()
    before = open_sockets()
    own = clients.take(hosted, 60.0)
    clients.give_back(own)
    hang_up(other_ends(before, hosted.port))
    other = clients.take(hosted, 60.0)
    assert other is not own
    other.set("key", "value")


def test_a_store_whose_host_is_gone_is_asked_nothing_more() -> None:
    """Torch writes a page to stderr for each attempt."""
    asked: list[str] = []

    class Gone:
        def check(self, keys: list[str]) -> bool:
            asked.extend(keys)
            if len(asked) > 1:
                raise dist.DistNetworkError("Broken pipe")
            return True

        def add(self, key: str, _: int) -> int:
            asked.append(key)
            return 1

    store = UntilLost(cast("dist.Store", Gone()), {})
    assert store.check(["there"])
    with pytest.raises(dist.DistNetworkError, match="Broken pipe"):
        store.check(["gone"])
    with pytest.raises(dist.DistNetworkError, match="Broken pipe"):
        store.add("later", 1)
    assert asked == ["there", "gone"]


def test_what_its_host_has_closed_is_not_asked_at_all() -> None:
    near, far = socket.socketpair()
    ends = {os.fstat(near.fileno()).st_ino: near.fileno()}
    store = UntilLost(dist.HashStore(), ends)
    store.set("key", "value")
    far.close()
    with pytest.raises(dist.DistNetworkError, match="has closed the connection"):
        store.get("key")
    near.close()
