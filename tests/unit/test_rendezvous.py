"""The meeting of ranks, on threads and a store of this process."""

import contextlib
import threading
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from objcomm._transport import rendezvous
from objcomm._transport.rendezvous import GivenUpError, LeftError, MeetingState, meet
from objcomm._transport.store import loopback_store, read
from objcomm.errors import WireError
from tests.waits import PATIENCE_S, wait_until

Store = dist.Store

_LIMIT_S = PATIENCE_S

# The host of each thread; a rank announces its host in its hello.
_here = threading.local()


def hellos(store: Store) -> list[list[str]]:
    """Return the hellos of guests that no host has removed, in order and split into words."""
    said = read(store, "hellos") or b""
    return [entry.split() for entry in said.decode().splitlines()]


def say_hello(store: Store, number: str) -> None:
    """Say a hello of rank 1, as if it were on the host of rank 0."""
    store.append("hellos", f"1 {number} a -\n")  # type: ignore[attr-defined]  # not in torch's stub


def met(store: Store, hosts: list[str], attempts: list[MeetingState]) -> list[tuple[int, ...]]:
    def attend(rank: int) -> tuple[int, ...]:
        _here.name = hosts[rank]
        if rank:  # the last rank says hello first
            ours = dist.PrefixStore("objcomm", store)
            later = set(range(rank + 1, len(hosts)))
            wait_until(lambda: later <= {int(each[0]) for each in hellos(ours)}, "the later ranks")
        return meet(store, rank, len(hosts), attempts[rank]).hosts

    with ThreadPoolExecutor(len(hosts)) as ranks:
        return list(ranks.map(attend, range(len(hosts))))


def attend(store: Store, rank: int, attempts: list[MeetingState]) -> tuple[int, ...]:
    """Meet as one rank, on its own host."""
    _here.name = "abcd"[rank]
    return meet(store, rank, len(attempts), attempts[rank]).hosts


@contextlib.contextmanager
def attempts(size: int) -> Iterator[list[MeetingState]]:
    """Yield one meeting state per rank; all are given up after a time limit."""
    found = [MeetingState(rank, tuple(range(size))) for rank in range(size)]

    def give_up() -> None:
        for each in found:
            each.is_over = True

    late = threading.Timer(_LIMIT_S, give_up)
    late.start()
    yield found
    late.cancel()


@pytest.fixture(autouse=True)
def _several_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    _here.name = "a"
    monkeypatch.setattr(rendezvous, "machine", lambda: _here.name)


@pytest.fixture
def store() -> Store:
    return dist.HashStore()


@pytest.fixture
def ours(store: Store) -> Store:
    """The part of the store in which ranks meet."""
    return dist.PrefixStore("objcomm", store)


def test_every_rank_learns_the_name_and_which_ranks_share_a_host(store: Store) -> None:
    with attempts(4) as progress:
        hosts = met(store, ["b", "a", "b", "c"], progress)
    assert hosts == [(0, 1, 0, 2)] * 4
    assert len({each.nonce for each in progress} - {""}) == 1
    assert len({each.session for each in progress} - {""}) == 1


def _file_store(folder: Path) -> Store:
    return dist.FileStore(str(folder / "store"))


@pytest.mark.parametrize(
    "made",
    [_file_store, lambda _: dist.HashStore(), lambda _: loopback_store()],
    ids=["file", "hash", "tcp"],
)
def test_a_look_takes_few_queries_however_many_ranks_meet(
    made: Callable[[Path], dist.Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Counter[int]] = defaultdict(Counter)  # by kind, then by thread

    class Counting(dist.PrefixStore):
        """A store with its own client, as each rank has."""

        def __init__(self, prefix: str, store: Store) -> None:
            super().__init__(prefix, store.clone())  # type: ignore[attr-defined]  # not in torch's stub

    def counted(kind: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*arguments: Any) -> Any:
            asked[kind][threading.get_ident()] += 1
            return inner(*arguments)

        return ask

    kinds = {"compare_set": "read", "append": "write", "multi_set": "write", "set": "write"}
    kinds |= {"delete_key": "write", "check": "read", "get": "read", "multi_get": "read"}
    for name, kind in kinds.items():
        setattr(Counting, name, counted(kind, getattr(dist.PrefixStore, name)))
    monkeypatch.setattr(rendezvous, "_sleep", counted("look", rendezvous._sleep))  # noqa: SLF001  # each look ends with a sleep
    store = made(tmp_path)
    monkeypatch.setattr(dist, "PrefixStore", Counting)
    size = 30
    with attempts(size) as progress, ThreadPoolExecutor(size) as ranks:

        def attend(rank: int) -> int:
            _here.name = str(rank % 3)
            assert len(meet(store, rank, size, progress[rank]).hosts) == size
            return threading.get_ident()

        threads = list(ranks.map(attend, range(size)))
    assert len(set(threads)) == size
    # To append to a file, a rank reads and compares until no other rank came in between.
    adds = size if isinstance(store, dist.FileStore) else 0
    for thread in threads:
        looks = asked["look"][thread] + 2
        assert asked["read"][thread] <= 3 * looks + 2 * adds
        # The host answers at most once a look; then it removes two keys and sets one.
        assert asked["write"][thread] <= (looks + 2 if thread == threads[0] else 3)


def test_a_guest_whose_hello_was_removed_says_it_again(
    store: Store, ours: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host of an earlier meeting removes it just after it was said."""
    monkeypatch.setattr(rendezvous, "_HELLO_INTERVAL_SECONDS", 0.01)
    with attempts(2) as progress, ThreadPoolExecutor(1) as guest:
        found = guest.submit(attend, store, 1, progress)
        for _ in range(2):
            wait_until(lambda: hellos(ours), "the guest")
            ours.delete_key("hellos")
        assert attend(store, 0, progress) == (0, 1) == found.result(_LIMIT_S)


def test_appending_to_a_file_survives_the_removal_of_the_key(tmp_path: Path) -> None:
    """Torch's own append would loop forever if the key is removed."""
    store = _file_store(tmp_path)
    find = store.compare_set
    removed: list[str] = []

    class Removed:
        """Removes the key once, between an appender's read and its write."""

        def has_extended_api(self) -> bool:
            return False

        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            if expected and not removed:
                removed.append(expected)
                store.delete_key(key)
            return find(key, expected, desired)

    for entry in ("first\n", "second\n", "third\n"):
        rendezvous._append(Removed(), "key", entry)  # noqa: SLF001  # it has a store's methods
    assert removed == ["first\n"]
    assert store.get("key") == b"second\nthird\n"


@pytest.mark.parametrize("is_answered", [False, True], ids=["before the host comes", "answered"])
def test_a_late_hello_of_an_earlier_attempt_does_not_replace_the_new_one(
    store: Store, ours: Store, *, is_answered: bool
) -> None:
    """The rank that wrote it had given up while the store was out of reach."""
    late = uuid.uuid4().hex

    class Guest(MeetingState):
        """The late hello is answered between its own answer and its joining."""

        def look_around(self) -> None:
            if is_answered:
                say_hello(ours, late)
                wait_until(lambda: ours.check([f"welcome/{late}"]), "its answer")

    with attempts(2) as progress, ThreadPoolExecutor(1) as guest:
        progress[1] = Guest(1, (0, 1))
        found = guest.submit(attend, store, 1, progress)
        if not is_answered:
            wait_until(lambda: hellos(ours), "the guest")
            say_hello(ours, late)
        assert attend(store, 0, progress) == (0, 1) == found.result(_LIMIT_S)
    assert progress[0].session == progress[1].session != ""


def test_a_meeting_that_was_given_up_ends(store: Store) -> None:
    progress = MeetingState(1, (0, 1))
    progress.is_over = True
    with pytest.raises(GivenUpError):
        meet(store, 1, 2, progress)


def test_a_guest_that_leaves_a_message_ends_the_meeting_of_all(store: Store, ours: Store) -> None:
    with attempts(4) as progress, ThreadPoolExecutor(3) as guests:
        left = [guests.submit(attend, store, rank, progress) for rank in (1, 2, 3)]
        wait_until(lambda: len(hellos(ours)) == 3, "the guests")
        progress[1].parting = b"\xffmessage"
        progress[1].is_over = True
        assert isinstance(left[0].exception(_LIMIT_S), GivenUpError)
        for each in left[1:]:
            error = each.exception(_LIMIT_S)
            assert isinstance(error, LeftError)
            assert error.message == b"\xffmessage"
    assert_no_answer_is_left(ours, 3)


def test_a_guest_that_leaves_a_named_meeting_ends_only_its_own(store: Store, ours: Store) -> None:
    """The others are in a named meeting, where it can post why it left."""

    class Leaving(MeetingState):
        """It is asked to leave once it has been answered."""

        def await_rank(self, peer: int) -> None:
            if hellos(ours) and ours.check([f"welcome/{number_of(1)}"]):
                self.parting, self.is_over = b"message", True
            super().await_rank(peer)

    def number_of(rank: int) -> str:
        return next(number for peer, number, *_ in hellos(ours) if peer == str(rank))

    with attempts(3) as progress, ThreadPoolExecutor(2) as guests:
        progress[1] = Leaving(1, (0, 1, 2))
        left = [guests.submit(attend, store, rank, progress) for rank in (1, 2)]
        wait_until(lambda: len(hellos(ours)) == 2, "the guests")
        for rank in (2, 1):
            ours.set(f"welcome/{number_of(rank)}", "the host's nonce")
        assert isinstance(left[0].exception(_LIMIT_S), GivenUpError)
        wait_until(lambda: progress[2].nonce == "the host's nonce", "the other guest")
        progress[2].is_over = True
        assert isinstance(left[1].exception(_LIMIT_S), GivenUpError)
    ours.delete_key(f"welcome/{number_of(1)}")  # as its host does in the end
    assert_no_answer_is_left(ours, 2)


def test_a_guests_message_does_not_reach_its_own_next_meeting(store: Store, ours: Store) -> None:
    """A pair's first use may begin again before the thread of the previous attempt has looked."""
    again = uuid.uuid4().hex

    class Leaving(MeetingState):
        """It is asked to leave once it has said hello again."""

        def await_rank(self, peer: int) -> None:
            say_hello(ours, again)
            self.parting, self.is_over = b"message", True
            super().await_rank(peer)

    with pytest.raises(GivenUpError):
        meet(store, 1, 2, Leaving(1, (0, 1)))
    assert again in [number for _, number, *_ in hellos(ours)]
    assert not ours.check([f"welcome/{again}"])


def assert_no_answer_is_left(store: Store, guests: int) -> None:
    numbers = [number for _, number, *_ in hellos(store)]
    assert len(numbers) == guests
    assert not any(store.check([f"welcome/{number}"]) for number in numbers)


@pytest.mark.parametrize("is_forged", [False, True], ids=["replayed", "with the new number"])
def test_an_answer_of_an_earlier_meeting_does_not_bring_back_its_session(
    store: Store, ours: Store, *, is_forged: bool
) -> None:
    """Anything that reaches the store can answer as rank 0 did in a recorded run."""
    with attempts(2) as old:
        met(dist.HashStore(), ["a", "b"], old)
    assert old[0].session == old[1].session
    progress = MeetingState(1, (0, 1))

    def answer() -> None:
        wait_until(lambda: hellos(ours), "the guest")
        number = hellos(ours)[0][1]
        nonce = old[0].nonce
        ours.set(f"welcome/{number}", nonce)
        guests = number if is_forged else uuid.uuid4().hex
        ours.set(f"go/{nonce}", f"0/-/{nonce} 1/-/{guests}")

    with ThreadPoolExecutor(1) as attacker:
        attacker.submit(answer)
        if is_forged:
            assert meet(store, 1, 2, progress).hosts == (0, 1)
        else:
            with pytest.raises(WireError, match="objcomm did not write"):
                meet(store, 1, 2, progress)
    assert progress.nonce == old[0].nonce
    assert progress.session != old[0].session


def refused(size: int, rank: int, say: Callable[[Store, MeetingState], None]) -> None:
    """Check that a rank in a meeting refuses what another program writes into the store."""
    store, progress = dist.HashStore(), MeetingState(rank, tuple(range(size)))
    ours = dist.PrefixStore("objcomm", store)

    def answer() -> None:
        wait_until(lambda: hellos(ours) if rank else progress.nonce, "the rank")
        say(ours, progress)

    with ThreadPoolExecutor(1) as stranger:
        stranger.submit(answer)
        with pytest.raises(WireError, match="objcomm did not write"):
            meet(store, rank, size, progress)


def test_a_join_with_a_number_that_was_never_answered_is_refused() -> None:
    refused(2, 0, lambda ours, host: ours.set(f"joined/{host.nonce}", "1 a_number\n"))


@pytest.mark.parametrize("go", [b"\xff\xfe", b"no numbers", b"0/n", b"0/n x/{}", b"0/n 1/{} 2/n"])
def test_a_go_that_the_host_did_not_write_is_refused(go: bytes) -> None:
    def answer(ours: Store, _: MeetingState) -> None:
        number = hellos(ours)[0][1]
        ours.set(f"welcome/{number}", "n")
        ours.set("go/n", go.replace(b"{}", number.encode()))  # type: ignore[arg-type]  # torch takes bytes as well

    refused(2, 1, answer)


def test_a_damaged_message_of_a_guest_that_has_left_is_refused() -> None:
    damaged = "given up, but not in hexadecimal digits"
    refused(3, 1, lambda ours, _: ours.set(f"welcome/{hellos(ours)[0][1]}", damaged))
