"""The meeting, on threads and a store of this process."""

import contextlib
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from objcomm._transport import rendezvous
from objcomm._transport.rendezvous import GivenUpError, MeetingState, meet
from objcomm.errors import WireError
from tests.waits import PATIENCE_S, wait_until

_LIMIT_S = PATIENCE_S

# Each thread's own host; a rank says on which it is when it says hello.
_here = threading.local()


def met(store: dist.Store, hosts: list[str], attempts: list[MeetingState]) -> list[tuple[int, ...]]:
    def attend(rank: int) -> tuple[int, ...]:
        _here.name = hosts[rank]
        if rank:  # the last one says hello first
            hellos = [f"objcomm/hello/{each}" for each in later(rank)]
            wait_until(lambda: all(store.check([hello]) for hello in hellos), "the later ranks")
        return meet(store, rank, len(hosts), attempts[rank]).hosts

    def later(rank: int) -> range:
        return range(rank + 1, len(hosts))

    with ThreadPoolExecutor(len(hosts)) as ranks:
        return list(ranks.map(attend, range(len(hosts))))


@contextlib.contextmanager
def attempts(size: int) -> Iterator[list[MeetingState]]:
    """One for each rank; they are given up when that takes too long."""
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
    monkeypatch.setattr(rendezvous, "machine", lambda: _here.name)


def test_every_rank_learns_the_name_and_who_shares_a_host() -> None:
    with attempts(4) as progress:
        told = met(dist.HashStore(), ["b", "a", "b", "c"], progress)
    assert told == [(0, 1, 0, 2)] * 4
    assert len({each.nonce for each in progress} - {""}) == 1
    assert len({each.session for each in progress} - {""}) == 1


def test_a_hello_of_an_attempt_before_that_comes_late_does_not_hide_the_new_one() -> None:
    """Its writer had given up while the store was out of reach."""
    store = dist.HashStore()

    class Late(threading.Thread):
        def run(self) -> None:
            while not store.check(["objcomm/hello/1"]):
                pass
            store.set("objcomm/hello/1", f"{uuid.uuid4().hex} a")

    late = Late(daemon=True)
    late.start()
    with attempts(2) as progress, ThreadPoolExecutor(1) as guest:
        _here.name = "a"

        def attend() -> tuple[int, ...]:
            _here.name = "b"
            return meet(store, 1, 2, progress[1]).hosts

        told = guest.submit(attend)
        late.join(_LIMIT_S)
        assert meet(store, 0, 2, progress[0]).hosts == (0, 1) == told.result(_LIMIT_S)
    assert progress[0].session == progress[1].session != ""


def test_a_meeting_that_was_given_up_ends() -> None:
    progress = MeetingState(1, (0, 1))
    progress.is_over = True
    _here.name = "a"
    with pytest.raises(GivenUpError):
        meet(dist.HashStore(), 1, 2, progress)


def test_a_late_hello_of_an_attempt_before_does_not_take_the_place_of_who_joins() -> None:
    store = dist.HashStore()
    ours = dist.PrefixStore("objcomm", store)

    class HeldUp(MeetingState):
        """Between the answer and the joining the late hello is answered, too."""

        def look_around(self) -> None:
            late = uuid.uuid4().hex
            ours.set("hello/1", f"{late} c")
            wait_until(lambda: ours.check([f"welcome/{late}"]), "its answer")

    guests = HeldUp(1, (0, 1))
    with attempts(2) as progress, ThreadPoolExecutor(1) as guest:
        _here.name = "b"

        def attend() -> tuple[int, ...]:
            _here.name = "b"
            return meet(store, 1, 2, guests).hosts

        told = guest.submit(attend)
        assert meet(store, 0, 2, progress[0]).hosts == (0, 0) == told.result(_LIMIT_S)
    assert progress[0].session == guests.session != ""


@pytest.mark.parametrize("is_forged", [False, True], ids=["the old words", "with the new number"])
def test_an_answer_of_an_earlier_meeting_gives_no_guest_that_meetings_session(
    *, is_forged: bool
) -> None:
    """Whoever reaches the store can answer as rank 0 did in a run that was recorded."""
    store = dist.HashStore()
    ours = dist.PrefixStore("objcomm", store)
    with attempts(2) as old:
        met(dist.HashStore(), ["a", "b"], old)
    assert old[0].session == old[1].session
    progress = MeetingState(1, (0, 1))
    _here.name = "b"

    def answer() -> None:
        wait_until(lambda: ours.check(["hello/1"]), "the guest")
        number = ours.get("hello/1").decode().split()[0]
        nonce = old[0].nonce
        ours.set(f"welcome/{number}", nonce)
        guests = number if is_forged else uuid.uuid4().hex
        ours.set(f"go/{nonce}", f"0/-/{nonce} 1/-/{guests}")

    with ThreadPoolExecutor(1) as attacker:
        attacker.submit(answer)
        if is_forged:
            assert meet(store, 1, 2, progress).hosts == (0, 1)
        else:
            with pytest.raises(WireError, match="no rank of objcomm wrote"):
                meet(store, 1, 2, progress)
    assert progress.nonce == old[0].nonce
    assert progress.session != old[0].session


def test_who_has_joined_under_a_number_that_was_never_answered_is_no_rank() -> None:
    store = dist.HashStore()
    ours = dist.PrefixStore("objcomm", store)
    progress = MeetingState(0, (0, 1))
    _here.name = "a"

    def join() -> None:
        wait_until(lambda: progress.nonce, "the host")
        ours.set(f"joined/{progress.nonce}/1", "a number")

    with ThreadPoolExecutor(1) as stranger:
        stranger.submit(join)
        with pytest.raises(WireError, match="no rank of objcomm wrote"):
            meet(store, 0, 2, progress)


@pytest.mark.parametrize("word", [b"\xff\xfe", b"no numbers", b"0/n", b"0/n x/{}", b"0/n 1/{} 2/n"])
def test_what_no_rank_wrote_is_told_as_that(word: bytes) -> None:
    """Another program uses the same store, or its content was damaged."""
    store = dist.HashStore()
    progress = MeetingState(1, (0, 1))
    _here.name = "a"

    def answer() -> None:
        ours = dist.PrefixStore("objcomm", store)
        wait_until(lambda: ours.check(["hello/1"]), "the guest")
        number = ours.get("hello/1").decode().split()[0]
        ours.set(f"welcome/{number}", "n")
        ours.set("go/n", word.replace(b"{}", number.encode()))  # type: ignore[arg-type]  # torch takes bytes as well

    with ThreadPoolExecutor(1) as host:
        host.submit(answer)
        with pytest.raises(WireError, match="no rank of objcomm wrote"):
            meet(store, 1, 2, progress)
