"""Connections to a store, and which thread gets which."""

import os
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from objcomm._transport.sockets import hang_up, open_sockets, other_ends
from objcomm._transport.store import Clients, SharedStore, StorePart, loopback_store, read, under
from objcomm._world import bare

CLOSED = "has closed the connection"


@pytest.fixture(params=["tcp", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> dist.Store:
    is_file = request.param == "file"
    found: dist.Store = dist.FileStore(str(tmp_path / "store"), 1) if is_file else loopback_store()
    return dist.PrefixStore("part", found)


def test_clients_needed_at_the_same_time_are_separate_and_reused_later(store: dist.Store) -> None:
    clients = Clients()
    one, other = clients.take(store, 60.0), clients.take(store, 60.0)
    assert bare(one) is not bare(other)
    one.set("key", "of the store's own part")
    assert store.get("key") == other.get("key")
    clients.give_back(other)
    clients.give_back(one)
    assert clients.take(store, 60.0) is one
    assert clients.take(store, 60.0) is not other  # only one is kept


def test_reading_a_key_writes_nothing(store: dist.Store) -> None:
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
    hosted, clients = loopback_store(), Clients()
    own = clients.take(hosted, 60.0)
    del hosted
    with pytest.raises(dist.DistNetworkError):
        own.add("key", 1)


@pytest.mark.parametrize("is_kept", [True, False])
def test_connecting_to_a_store_whose_host_is_gone_fails_immediately(*, is_kept: bool) -> None:
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


def shared_to(store: dist.Store) -> SharedStore:
    shared = SharedStore()
    shared.open(store, 60.0)
    return shared


def test_a_part_of_a_shared_store_has_the_same_keys_as_torchs(store: dist.Store) -> None:
    part = under(StorePart(shared_to(store), "one"), "two")
    part.set("key", "value")
    assert dist.PrefixStore("one/two", store).get("key") == b"value"
    assert read(part, "key") == b"value"
    assert part.add("count", 2) == 2
    assert not part.check(["another"])


def test_after_an_error_a_shared_store_gets_no_more_requests() -> None:
    """Torch writes a page to stderr for each attempt, and may read a late answer as the next."""
    requested: list[str] = []

    class Slow(dist.HashStore):
        def add(self, key: str, _: int) -> int:
            requested.append(key)
            raise dist.DistNetworkError("timed out")

        def clone(self) -> dist.Store:
            return self

    part = StorePart(shared_to(Slow()), "part")
    with mock.patch.object(dist, "PrefixStore", lambda _, store: store):
        for _ in range(2):
            with pytest.raises(dist.DistNetworkError, match="timed out"):
                part.add("key", 1)
    assert requested == ["key"]


def test_a_shared_store_whose_host_has_closed_it_gets_no_requests() -> None:
    hosted = loopback_store()
    part = StorePart(shared_to(hosted), "part")
    part.set("key", "value")
    del hosted
    with pytest.raises(dist.DistNetworkError, match=CLOSED):
        part.check(["key"])


def test_a_shared_store_is_opened_again_after_an_outage_but_not_after_it_was_hung_up() -> None:
    hosted, shared = loopback_store(), SharedStore()
    with pytest.raises(dist.DistNetworkError, match="not connected"):
        shared.request("part", "add", "key", 1)
    before = open_sockets()
    for number in (1, 2):
        shared.open(hosted, 60.0)
        shared.open(hosted, 60.0)
        assert shared.request("part", "add", "key", 1) == number
        assert shared.port == hosted.port
        (end,) = other_ends(before, hosted.port)
        hang_up({end})
        with pytest.raises(dist.DistNetworkError, match=CLOSED):
            shared.request("part", "add", "key", 1)
    shared.hang_up()
    with pytest.raises(dist.DistNetworkError, match=CLOSED):
        shared.open(hosted, 60.0)
