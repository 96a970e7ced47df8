"""Which kind of link joins a group's ranks, and what prevents them from using streams."""

import os
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import objcomm
from objcomm import CollectiveError, TransportError, UsageError
from objcomm._algorithms import topology
from objcomm._failures import liveness
from objcomm._transport import connect, doors, rendezvous
from objcomm._transport.gloo import GlooLink
from objcomm._world import CONNECT_MAX
from tests.faults.victim import sockets
from tests.group.helpers import (
    assert_group_works,
    error_in,
    exit_at_once,
    kind_of,
    subgroup,
    tell_all,
)
from tests.group.reports import logged
from tests.hosts import free_port
from tests.ranks import ranks
from tests.waits import PATIENCE_S, wait_until, within
from tests.workers import here

_UNIX, _TCP, _GLOO = "Unix sockets", "TCP", "Gloo"


def assert_joined_by(kind: str) -> None:
    """Check that a new group of all ranks works and has the same kind of link on every rank."""
    with subgroup(*range(here().world_size)) as group:
        assert_group_works(group)
        assert tell_all(f"the link {kind}", kind_of(group)) == [kind] * here().world_size


def with_each_door(act: Callable[[doors.Door], object]) -> AbstractContextManager[object]:
    """Pass each door that this rank opens to a function, before other ranks can find it."""
    opened = doors.Door.opened

    def opened_and_passed_on(*arguments: Any) -> doors.Door:
        door = opened(*arguments)
        act(door)
        return door

    return mock.patch.object(doors.Door, "opened", opened_and_passed_on)


def connected_to(door: doors.Door, kind: str = _UNIX) -> socket.socket:
    """Connect to a door as a stranger."""
    if kind == _TCP:
        return socket.create_connection((door.endpoint.addresses[0], door.endpoint.port))
    stranger = socket.socket(socket.AF_UNIX)
    stranger.connect(f"\0objcomm/{door.endpoint.name}")
    return stranger


@ranks(2, 4)
def test_ranks_of_one_host_need_no_network_and_no_thread() -> None:
    assert_joined_by(_UNIX)
    with subgroup(*range(here().world_size)) as group:
        threads, connections = tasks(), inet()  # includes those of torch's own group
        assert_group_works(group)
        assert kind_of(group) == _UNIX
        assert inet() <= connections  # an earlier group's may close late
        wait_until(lambda: tasks() <= threads, "no thread more than before")


def tasks() -> int:
    """Count this process's threads, including torch's."""
    return len(list(Path("/proc/self/task").iterdir()))


def inet() -> int:
    """Count this process's network sockets."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        # The error of a descriptor that is not a socket, or was closed meanwhile.
        with suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as end:
            found += end.family in {socket.AF_INET, socket.AF_INET6}
    return found


@contextmanager
def far_apart() -> Iterator[None]:
    """Make each rank appear to be on its own host, also to the check that ranks are alive.

    It only has an effect on a world that has not been used before.
    """
    name = f"host{here().rank}"
    with (
        mock.patch.object(rendezvous, "machine", return_value=name),
        mock.patch.object(liveness, "machine", return_value=name),
    ):
        yield


#: Replacements for a function of ``doors`` on one rank.
LACKING = {
    "a name that the system refuses": ("_unix_address", lambda door: f"\0{door}" * 10),
    "a door that nobody finds": ("_unix_address", lambda door: f"\0nowhere/{door}"),
    "another user": ("_uid_of", lambda _: os.geteuid() + 1),
}
# The same for a function that only connections between hosts need.
FAR_LACKING = {
    "no address": ("_listener", lambda *_: no_listener()),
    "an address that nobody reaches": ("_listener", lambda *_: deaf()),
}


def no_listener() -> socket.socket:
    raise OSError(0, "no address")


def deaf() -> socket.socket:
    """Return a listener that is already shut down, so that connections to it are refused."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.shutdown(socket.SHUT_RDWR)
    return listener


def in_a_tree() -> AbstractContextManager[object]:
    """Make a few ranks of a host behave like many: meet in a tree and connect at first use."""
    return mock.patch.object(connect, "_AT_ONCE_MAX", 1)


def of_each(lacking: Iterable[str], ranks: Iterable[int]) -> list[Any]:
    """Return each kind of lack on each rank.

    Rank 0 only accepts connections. If it alone takes the others for another user, they call it
    again and again for 30 s, whereas real ranks of two users both know.
    """
    one_sided = ("another user", 0)
    return [
        pytest.param(*pair, marks=[pytest.mark.long] * (pair == one_sided))
        for pair in product(lacking, ranks)
    ]


@pytest.mark.parametrize(("lacking", "rank"), of_each([*LACKING, *FAR_LACKING], [0, 1, 2]))
@ranks(3)
def test_if_one_rank_lacks_streams_all_use_gloo(lacking: str, rank: int) -> None:
    with far_apart() if lacking in FAR_LACKING else nullcontext():
        check_that_all_use_gloo(lacking, rank)


@pytest.mark.parametrize(("lacking", "rank"), of_each(LACKING, [0, 2, 3]))
@ranks(4)
def test_if_one_rank_lacks_streams_at_first_use_all_use_gloo(lacking: str, rank: int) -> None:
    with in_a_tree():
        check_that_all_use_gloo(lacking, rank)


def check_that_all_use_gloo(lacking: str, rank: int) -> None:
    assert_joined_by(_TCP if lacking in FAR_LACKING else _UNIX)
    before = len(sockets())
    name, stand_in = (LACKING | FAR_LACKING)[lacking]
    with mock.patch.object(doors, name, stand_in) if here().rank == rank else nullcontext():
        assert_joined_by(_GLOO)
    wait_until(lambda: len(sockets()) <= before, "no socket more than before")


@pytest.mark.parametrize("lacking", LACKING)
@ranks(3)
def test_a_rank_that_wants_streams_never_gets_gloo(lacking: str) -> None:
    """Every rank raises, even those that accept Gloo, and the next group works."""
    name, stand_in = LACKING[lacking]
    with (
        subgroup(0, 1, 2) as group,
        mock.patch.object(doors, name, stand_in) if here().rank == 1 else nullcontext(),
        objcomm.configure(transport="streams") if here().rank == 2 else nullcontext(),
    ):
        error = error_in(TransportError, lambda: objcomm.barrier(group=group))
    assert "connect" in error.reason
    assert_joined_by(_UNIX)


@ranks(3)
def test_gloo_on_one_rank_and_streams_on_another_is_an_error_on_all() -> None:
    wishes: dict[int, Any] = {0: "streams", 1: "gloo", 2: "auto"}
    with subgroup(0, 1, 2) as group, objcomm.configure(transport=wishes[here().rank]):
        error = error_in(TransportError, lambda: objcomm.barrier(group=group))
    assert 'has chosen transport="gloo"' in error.reason
    assert error.peers == (1,)
    assert_group_works()


@ranks(3)
def test_one_rank_that_chooses_gloo_decides_for_all_and_the_others_log_why() -> None:
    is_asked = here().rank == 1
    with logged() as texts, objcomm.configure(transport="gloo") if is_asked else nullcontext():
        assert_joined_by(_GLOO)
    warnings = [each for each in texts if "over Gloo" in each and "because rank 1 (host " in each]
    assert len(warnings) == (0 if is_asked else 1)
    assert all('has chosen transport="gloo"' in each for each in warnings)
    assert all('configure(transport="streams")' in each for each in warnings)
    assert_joined_by(_UNIX)


@ranks(2, environment={"OBJCOMM_TRANSPORT": "glue"})
def test_a_transport_that_does_not_exist_is_an_error_before_ranks_meet() -> None:
    with subgroup(0, 1) as group, pytest.raises(UsageError, match="OBJCOMM_TRANSPORT='glue'"):
        objcomm.barrier(group=group)
    with pytest.raises(UsageError, match="configure: transport='shm' must be one of 'auto'"):
        objcomm.configure(transport="shm")  # type: ignore[arg-type]  # wrong on purpose
    with objcomm.configure(transport="auto"):
        assert_joined_by(_UNIX)


@pytest.mark.parametrize("ports", ["", "0", "70000", "5-4", "1-65536", "all", "80:90", 5])
def test_ports_that_do_not_exist_are_an_error(ports: Any) -> None:
    with pytest.raises(UsageError, match="must be a port from 1 to 65535"):
        objcomm.configure(ports=ports)


@ranks(3)
def test_ranks_of_several_hosts_are_reached_at_the_ports_that_were_chosen() -> None:
    first = int(tell_all("the first port", str(free_port()))[0])
    found: list[int] = []
    with (
        far_apart(),
        objcomm.configure(ports=f"{first}-{first + 2}"),
        with_each_door(lambda door: found.append(door.endpoint.port)),
    ):
        assert_joined_by(_TCP)
    assert sorted(map(int, tell_all("ports", str(found[0])))) == [first, first + 1, first + 2]


@ranks(2)
def test_a_rank_without_a_port_is_named_on_all() -> None:
    port = tell_all("the one port", str(free_port()))[0]
    with far_apart(), objcomm.configure(ports=port), subgroup(0, 1) as group:
        error = error_in(TransportError, lambda: objcomm.barrier(group=group))
    assert f"none of the ports {port}-{port} is free" in error.reason
    assert_group_works()


@pytest.mark.parametrize("way", ["immediately", "at first use"])
@ranks(3)
def test_a_rank_is_reached_at_the_address_that_works(way: str) -> None:
    """The first address belongs to no host; it is reserved for documentation (RFC 5737).

    Without the empty ``interface_addresses``, 127.0.0.1 would be skipped as a rank's own address.
    """
    addresses = ["192.0.2.1", "127.0.0.1"]
    with (
        far_apart(),
        mock.patch.object(connect, "own_addresses", return_value=addresses),
        mock.patch.object(doors, "interface_addresses", return_value={}),
        in_a_tree() if way == "at first use" else nullcontext(),
    ):
        assert_joined_by(_TCP)


@ranks(3)
def test_another_process_at_a_ranks_address_is_skipped() -> None:
    """As if two hosts had interfaces with the same address, so that each reaches itself."""
    listener = socket.create_server(("127.0.0.1", 0))
    call = doors.Doors.call
    answered: list[socket.socket] = []

    def answer() -> None:
        with suppress(OSError):
            while True:
                answered.append(listener.accept()[0])
                answered[-1].sendall(bytes(doors.Handshakes.nbytes))

    def led_astray(ours: doors.Doors, peer: int, way: int = 0) -> doors.Call:
        if way:
            return call(ours, peer)
        end = socket.create_connection(listener.getsockname())
        end.settimeout(0)
        return doors.Call(end, ours.handshake_to(peer), "")

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with (
            far_apart(),
            mock.patch.object(doors.Doors, "call", led_astray),
            mock.patch.object(doors.Doors, "ways_to", return_value=2),
        ):
            assert_joined_by(_TCP)
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        for each in (listener, *answered):
            each.close()
    assert len(answered) == here().rank  # one for each rank that it called


@ranks(2)
def test_a_process_that_passes_on_what_two_ranks_say_gets_no_further() -> None:
    """It listens where one of them connects, and connects to the other, to read all traffic."""
    listener = socket.create_server(("127.0.0.1", 0))
    address, port = listener.getsockname()
    call = doors.Doors.call
    said: list[bytes] = []
    answers: list[bytes] = []

    def pass_on(door: tuple[str, int]) -> None:
        end, _ = listener.accept()
        with end, socket.create_connection(door) as there:
            said.append(end.recv(99))
            there.sendall(said[-1])
            with suppress(ConnectionResetError):
                answers.append(there.recv(99))

    threads: list[threading.Thread] = []

    def led_astray(ours: doors.Doors, peer: int, way: int = 0) -> doors.Call:
        real = call(ours, peer)
        if way:
            return real
        real.socket.close()
        there = address, ours._endpoints[peer].port  # noqa: SLF001  # the process has read the store
        threads.append(threading.Thread(target=pass_on, args=[there]))
        threads[0].start()
        end = socket.create_connection((address, port))
        end.settimeout(0)
        where = f"{address} {port}"
        return doors.Call(end, ours.handshake_to(peer, where), where)

    with (
        listener,
        far_apart(),
        mock.patch.object(doors.Doors, "call", led_astray),
        mock.patch.object(doors.Doors, "ways_to", return_value=2),
    ):
        assert_joined_by(_TCP)
        for each in threads:
            each.join()
    assert [len(each) for each in said] == [doors.Handshakes.nbytes] * here().rank
    assert answers in ([], [b""])


@pytest.mark.parametrize("what", ["another port", "another host"])
@ranks(3)
def test_nobody_can_give_another_address_for_a_rank_in_the_store(what: str) -> None:
    """A process with access to the store could do so, then relay what others send to that rank."""
    meet, before = rendezvous._append, socket.gethostname()  # noqa: SLF001  # where a rank publishes its address

    def changed(store: dist.Store, key: str, entry: str) -> None:
        if what == "another port":
            entry = re.sub(r",\d+,", ",4711,", entry)
        else:
            entry = entry.replace(f",{before},", ",elsewhere,")
        meet(store, key, entry)

    with (
        far_apart(),
        subgroup(0, 1, 2) as group,
        mock.patch.object(rendezvous, "_append", changed) if here().rank == 1 else nullcontext(),
    ):
        error = error_in(TransportError, lambda: objcomm.barrier(group=group))
    assert "holds data that objcomm did not write" in error.reason
    assert_group_works()


class _OfAnotherMeeting(doors.Handshakes):
    def __init__(self, _: str, secret: bytes | None) -> None:
        super().__init__("00" * 32, secret)


@ranks(3)
def test_over_gloo_a_process_that_was_not_at_the_meeting_gets_nothing() -> None:
    """It may connect before a rank does, and Gloo then takes it for that rank."""
    stranger = mock.patch.object(connect, "Handshakes", _OfAnotherMeeting)
    with (
        subgroup(0, 1, 2) as group,
        objcomm.configure(transport="gloo"),
        stranger if here().rank == 1 else nullcontext(),
        mock.patch.object(GlooLink, "take", side_effect=AssertionError("it was listened to")),
    ):
        error = error_in(TransportError, lambda: objcomm.all_gather("secret", group=group))
    assert "another process has answered for one of them" in error.reason
    assert_group_works()


@ranks(2)
def test_over_gloo_nothing_waits_for_a_proof_once_the_meeting_has_ended() -> None:
    """A thread still waiting at interpreter exit would abort the process."""
    is_tested = threading.Event()

    def silent(*_: Any) -> None:  # stays connected until rank 0 was checked
        is_tested.wait(PATIENCE_S)
        raise rendezvous.GivenUpError

    limit = 1.0 if here().rank else None  # rank 0's is longer, so rank 1's timeout ends its call
    with subgroup(0, 1) as group:
        with (
            objcomm.configure(transport="gloo"),
            mock.patch.object(connect, "_prove", silent) if here().rank else nullcontext(),
        ):
            error_in(TransportError, lambda: objcomm.all_gather(1, group=group, timeout=limit))
        if not here().rank:
            in_time = CONNECT_MAX.total_seconds() / 2
            wait_until(lambda: not _connectors(), "no thread connects", in_time)
        assert_group_works()
        is_tested.set()


@pytest.mark.parametrize("kind", [_UNIX, _TCP])
@ranks(2, 4)
def test_a_rank_whose_connection_was_dropped_to_make_room_connects_again(kind: str) -> None:
    joining = connect._Joining  # noqa: SLF001  # there is no public way to crowd a door
    hear = joining._receive  # noqa: SLF001  # likewise
    sent_away: list[Any] = []

    def crowded(self: Any, caller: Any) -> None:
        if caller.is_unknown and not sent_away:
            sent_away.append(caller)
            self._drop(caller)
        else:
            hear(self, caller)

    with (
        far_apart() if kind == _TCP else nullcontext(),
        mock.patch.object(joining, "_receive", crowded) if here().rank == 0 else nullcontext(),
    ):
        assert_joined_by(kind)
    assert len(sent_away) == (here().rank == 0)


def _connectors() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "objcomm-connect"]


@pytest.mark.parametrize(
    "word",
    [
        b"",
        b"x",
        bytes(36),
        b"\xff" * 36,
        (1).to_bytes(4, "little") + bytes(32),
        (2).to_bytes(4, "little") + bytes(500),
    ],
    ids=["nothing", "one byte", "rank 0", "no rank", "no proof", "much"],
)
@pytest.mark.parametrize("kind", [_UNIX, _TCP])
@ranks(3)
def test_strangers_get_nothing_and_delay_no_rank(kind: str, word: bytes) -> None:
    """Strangers connect before any rank does, send something, and stay."""
    strangers = []

    def connect_strangers(door: doors.Door) -> None:
        for _ in range(2):
            strangers.append(connected_to(door, kind))
            strangers[-1].sendall(word)
        if kind == _TCP:  # and one that has already left
            with connected_to(door, kind) as stranger:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with with_each_door(connect_strangers), far_apart() if kind == _TCP else nullcontext():
        assert_joined_by(kind)
    for each in strangers:
        with each:
            # A silent stranger over TCP may not have been accepted, so no rank disconnects it.
            each.settimeout(60.0 if word or kind == _UNIX else 0.0)
            # No byte was sent to it; a reset means that its own bytes were not all read.
            with suppress(ConnectionResetError, BlockingIOError):
                assert each.recv(1) == b""


@ranks(2)
def test_refused_connections_are_counted_and_logged() -> None:
    with ExitStack() as strangers, logged() as texts, subgroup(0, 1) as group:

        def connect_strangers(door: doors.Door) -> None:
            for _ in range(2):
                stranger = strangers.enter_context(connected_to(door))
                stranger.sendall(bytes(doors.Handshakes.nbytes))

        with with_each_door(connect_strangers):
            objcomm.barrier(group=group)
        assert objcomm.stats(group)["refused"].calls == 2
        assert objcomm.stats(group)["barrier"].calls == 1
        warning = "refused a connection (2 so far)"
        wait_until(lambda: any(warning in each for each in texts), "the warning")


@ranks(20, disposable=True)
def test_many_ranks_of_a_host_connect_at_first_use() -> None:
    """Each rank is connected only to the ranks it exchanged with, and reports all failures."""
    rank, size = here().rank, here().world_size
    objcomm.barrier()
    with subgroup(*range(size)) as group:
        before = len(sockets())
        objcomm.barrier(group=group)
        count = len(sockets())
        objcomm.barrier()  # no rank opens further connections before all have counted
        assert kind_of(group) == _UNIX
        # The pair that wakes the link, its door, its neighbors in the tree of the meeting and in
        # that of the messages, and a client of the store.
        _, children, _ = topology.tree(rank, 0, (0,) * size)
        neighbours = (size - 1).bit_length() + 1 + len(children)
        assert count <= before + 2 + 1 + neighbours + 1
        for root in (0, 7, 19):
            assert objcomm.broadcast({"from": rank}, src=root, group=group) == {"from": root}
        assert objcomm.all_gather(rank, group=group) == list(range(size))
        received = objcomm.all_to_all([(rank, peer) for peer in range(size)], group=group)
        assert received == [(peer, rank) for peer in range(size)]  # every pair is connected
        assert objcomm.all_reduce(torch.full((40_000,), rank), "sum", group=group)[0] == 190
        failing = threading.Lock() if rank == 13 else "fine"
        error = error_in(CollectiveError, lambda: objcomm.all_gather(failing, group=group))
        assert list(error.failures) == [13]
        assert_group_works(group)


@ranks(20, expect_dead={13})
def test_the_death_of_one_of_many_ranks_is_named_by_all_though_few_are_connected_to_it() -> None:
    die_and_be_named(13)


def die_and_be_named(victim: int) -> None:
    objcomm.barrier()
    if here().rank == victim:
        exit_at_once()
    error = error_in(TransportError, objcomm.barrier)
    assert error.peers == (victim,)


# In the next three, a rank that raised must not exit while it still writes to the store: readers of
# a FileStore never get past a half-written record of a dead process.


@ranks(20, expect_dead={6})
def test_the_death_of_rank_6_of_many_hosts_is_named_by_all() -> None:
    """Rank 7 is connected only to rank 6, and losing it does not mean losing all the others."""
    with far_apart():
        die_and_be_named(6)


@ranks(20, expect_dead={7})
def test_the_death_of_rank_7_of_many_hosts_is_named_by_all() -> None:
    with far_apart():
        die_and_be_named(7)


@ranks(20, expect_dead={10})
def test_the_death_of_rank_10_of_many_hosts_is_named_by_all() -> None:
    with far_apart():
        die_and_be_named(10)


@ranks(20, expect_dead={13})
def test_a_dead_rank_of_another_host_that_no_rank_used_is_named() -> None:
    """Before the group's first use, and also by a rank that only polls."""
    with far_apart(), subgroup(*range(20)) as group:
        objcomm.barrier()  # torch's own connections exist as well
        if here().rank == 13:
            exit_at_once()
        if here().rank == 2:
            with pytest.raises(TransportError, match="rank 13"):
                wait_until(lambda: objcomm.iprobe(13) and None, "its end")
        error = error_in(TransportError, lambda: objcomm.barrier(group=group))
        assert 13 in error.peers


@pytest.mark.parametrize("others", [0, 1, 2])
@pytest.mark.parametrize("connected", ["for the first time", "after a desync"])
@ranks(3, 4, expect_dead={1})
def test_only_the_rank_that_dies_as_others_complete_is_named(others: int, connected: str) -> None:
    """The others close their connections too, but must not be named."""
    rank, size = here().rank, here().world_size

    def announce_and_die(joining: Any, _: object) -> None:
        for each in list(joining._joined.values())[:others]:  # noqa: SLF001  # where it dies
            each.socket.sendall(b"!")
        os.kill(os.getpid(), signal.SIGKILL)

    objcomm.barrier()
    group = dist.new_group()
    if connected == "after a desync":
        objcomm.barrier(group=group)
        with pytest.raises(objcomm.DesyncError):
            (objcomm.barrier if rank else objcomm.node_group)(group=group)
    if rank == 1:
        connect._Joining.complete = announce_and_die  # type: ignore[assignment,method-assign]  # noqa: SLF001  # likewise
    with within(3.0):
        error = error_in(TransportError, lambda: objcomm.barrier(group=group))
    assert error.peers == (1,)
    alive = [each for each in range(size) if each not in error.peers]
    assert objcomm.all_gather(rank, group=objcomm.new_group(alive)) == alive


@ranks(3, expect_dead={1})
def test_a_rank_that_dies_while_all_connect_is_named() -> None:
    objcomm.barrier()
    group = dist.new_group([0, 1, 2])
    if here().rank == 1:
        place = connect._Joining  # noqa: SLF001  # where it dies
        with mock.patch.object(place, "connect", side_effect=exit_at_once):
            objcomm.barrier(group=group)
    error = error_in(TransportError, lambda: objcomm.barrier(group=group))
    assert error.peers == (1,)


@ranks(2)
def test_two_ranks_that_first_send_to_each_other_may_take_long_to_connect() -> None:
    """They are connecting, so neither waits for the other's call and there is no deadlock."""
    connecting = connect._Joining.connect  # noqa: SLF001  # what takes long

    def slow(joining: Any) -> None:
        time.sleep(4.0)  # the search for deadlocks starts after one second
        connecting(joining)

    rank = here().rank
    with subgroup(0, 1) as group:
        objcomm.barrier(group=group)
        with mock.patch.object(connect._Joining, "connect", slow):  # noqa: SLF001  # likewise
            objcomm.send(f"from {rank}", 1 - rank, group=group)
        assert objcomm.recv(1 - rank, group=group) == f"from {1 - rank}"
