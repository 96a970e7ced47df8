"""Makes the ranks of one group agree on a name that no earlier group of theirs ever had.

A store outlives process groups, and groups made again get the same names: keys of an earlier
group, even of one that crashed half-way, must not be taken for this one's. So each rank says
hello under a fresh random number, rank 0 answers to that number, and when all have taken its
answer it says go, with everybody's number.

So a meeting has two names. Its nonce is rank 0's number, and names keys in the store. Its session
is made of the numbers of all ranks, and signatures are bound to it: whoever reaches the store can
answer a guest with the nonce of an earlier meeting, but nothing that was recorded there is signed
for a session that has this guest's number in it.
"""

from __future__ import annotations  # torch may be built without distributed

import functools
import hashlib
import time
import uuid
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from objcomm._environment import machine
from objcomm._transport.store import read
from objcomm.errors import WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import timedelta

    from objcomm._observe.history import CallRecord


#: What errors call the meeting.
FIRST_USE = "first use of the group"

_PREFIX = "objcomm"

_GIVEN_UP = "given up"

#: The door of a rank that has none.
NO_DOOR = "-"

_PAUSE_MIN_SECONDS = 0.0005
_PAUSE_MAX_SECONDS = 0.02
_LONG_PAUSE_SECONDS = 0.25
_SAID_FOR_SECONDS = 1.0
_READ_WITHIN_SECONDS = 5.0
# So a pause is at most 2 % of the wait before it: who has waited for minutes is in no hurry.
_GROWTH = 1.02


class GivenUpError(Exception):
    """Nobody waits for this meeting any more."""


class MeetingState:
    """How far a meeting has come, for whoever watches it from another thread.

    Attributes:
        nonce: the name in the store, once this rank knows it.
        session: what signatures are bound to, once all have met.
        is_over: set from outside to end the meeting.
        is_pair: whether two meet for messages from rank to rank.
        heed: given the blocks around the calls that wait, sets ``is_over`` if one has failed.
    """

    def __init__(self, rank: int, members: tuple[int, ...], *, is_pair: bool = False) -> None:
        """Begin.

        Args:
            rank: this one.
            members: who meets, the host first.
            is_pair: whether they meet for messages from rank to rank.
        """
        self.is_pair = is_pair
        self._members = members
        self.nonce = ""
        self.session = ""
        self.is_over = False
        self.heed: Callable[[set[str]], None] | None = None
        self._entries: list[CallRecord] = []
        self._awaits = members[1 if rank == members[0] else 0]

    def watch(self, entry: CallRecord) -> None:
        """Let ``entry`` tell whom this rank awaits."""
        self._entries.append(entry)
        entry.awaits = self._awaits

    def look_around(self) -> None:
        """Let go, before this rank joins another, of what a failure around its calls has ended.

        The rank that failed has told so before it left the block, and may be here from outside: it
        must not join a call that it would end.

        Raises:
            GivenUpError: it was ended.
        """
        blocks = {block for entry in self._entries for block in entry.regions}
        if blocks and self.heed is not None:
            self.heed(blocks)
        if self.is_over:
            raise GivenUpError

    def await_rank(self, peer: int) -> None:
        """Say whom this rank awaits, as a position among the members.

        Raises:
            GivenUpError: it need not.
        """
        if self.is_over:
            raise GivenUpError
        self._awaits = self._members[peer]
        for entry in self._entries:
            entry.awaits = self._awaits


class Met(NamedTuple):
    """What the ranks have told each other.

    Attributes:
        hosts: of each member, as a number; they count from 0 in the order of their first members.
        doors: where ranks of its host can reach each member; ``NO_DOOR`` for nowhere.
    """

    hosts: tuple[int, ...]
    doors: tuple[str, ...]


def meet(
    store: dist.Store, rank: int, size: int, progress: MeetingState, door: str = NO_DOOR
) -> Met:
    """Meet all ranks and agree on names that are new, which ``progress`` gets, and on the places.

    Every member must call this. It has no limit of its own: see ``MeetingState.is_over``.

    Args:
        store: the group's own.
        rank: this one's position among the members; 0 is the host.
        size: number of members.
        progress: tells others how far it has come.
        door: what the others are told of where this rank can be reached; one word.

    Returns:
        What all have told.

    Raises:
        GivenUpError: it was ended from outside.
        WireError: rank 0 did not meet this rank, or no rank wrote what stands in the store.
    """
    ours = dist.PrefixStore(_PREFIX, store)
    if rank != 0:
        return _meet_as_guest(ours, rank, size, progress, door)
    return _meet_as_host(ours, size, progress, door)


def forget(store: dist.Store, nonce: str, size: int, left: Iterable[str]) -> None:
    """Leave nothing behind; every rank calls this when it is connected, the last one cleans up.

    Args:
        store: as ``meet`` got it.
        nonce: of the meeting.
        size: number of members.
        left: the keys of this store in which the link has left something.
    """
    ours = dist.PrefixStore(_PREFIX, store)
    if ours.add(f"connected/{nonce}", 1) < size:
        return
    for key in (f"connected/{nonce}", f"go/{nonce}"):
        ours.delete_key(key)
    for key in left:
        store.delete_key(key)


def _meet_as_host(store: dist.Store, size: int, progress: MeetingState, door: str) -> Met:
    nonce = progress.nonce = uuid.uuid4().hex
    answered: dict[int, dict[str, str]] = {peer: {} for peer in range(1, size)}
    try:
        joined = _answer(store, progress, answered)
    except GivenUpError:
        if progress.is_pair and any(answered.values()):  # the guest has nobody else to wait for
            store.set(f"go/{nonce}", _GIVEN_UP)
        raise
    for peer, hellos in answered.items():
        welcomes = [f"welcome/{number}" for number in hellos]
        for key in (f"hello/{peer}", *welcomes, f"joined/{nonce}/{peer}"):
            store.delete_key(key)
    taken = [nonce, *(joined[peer] for peer in answered)]
    places = [answered[peer][joined[peer]].partition(" ") for peer in answered]
    names = [machine(), *(name for name, _, _ in places)]
    doors = [door, *(each for _, _, each in places)]
    hosts = {name: number for number, name in enumerate(dict.fromkeys(names))}
    told = " ".join(
        f"{hosts[name]}/{each}/{number}"
        for name, each, number in zip(names, doors, taken, strict=True)
    )
    store.set(f"go/{nonce}", told)
    return _agreed(told, taken[0], 0, size, progress)


def _answer(
    store: dist.Store, progress: MeetingState, answered: dict[int, dict[str, str]]
) -> dict[int, str]:
    """Answer all guests until each has joined; returns under which number each did.

    Args:
        store: theirs.
        progress: tells whom this rank awaits.
        answered: gets, of each guest, the numbers that were answered, with its machine.
    """
    nonce = progress.nonce
    joined: dict[int, str] = {}
    pause = _PAUSE_MIN_SECONDS
    while missing := [peer for peer in answered if peer not in joined]:
        progress.await_rank(missing[0])
        for peer in missing:
            if (hello := _read_text(store, f"hello/{peer}")) is not None:
                number, _, place = hello.partition(" ")
                if number not in answered[peer]:  # a stale hello is answered too, to nobody
                    progress.look_around()
                    store.set(f"welcome/{number}", nonce)
                    answered[peer][number] = place
                    pause = _PAUSE_MIN_SECONDS
        for peer in missing:
            if (taken := _read_text(store, f"joined/{nonce}/{peer}")) is not None:
                if taken not in answered[peer]:
                    raise _damaged(taken)
                joined[peer] = taken
        if len(joined) < len(answered):
            pause = _sleep(pause)
    return joined


def _meet_as_guest(
    store: dist.Store, rank: int, size: int, progress: MeetingState, door: str
) -> Met:
    while True:
        number = uuid.uuid4().hex
        say_hello = functools.partial(store.set, f"hello/{rank}", f"{number} {machine()} {door}")
        say_hello()
        nonce = _wait_for(store, f"welcome/{number}", progress, say_hello)
        progress.look_around()
        progress.nonce = nonce
        store.set(f"joined/{nonce}/{rank}", number)
        told = _wait_for(store, f"go/{nonce}", progress)
        if told != _GIVEN_UP:
            return _agreed(told, number, rank, size, progress)
        for key in (f"welcome/{number}", f"joined/{nonce}/{rank}", f"go/{nonce}"):
            store.delete_key(key)


def _agreed(told: str, number: str, rank: int, size: int, progress: MeetingState) -> Met:
    """What rank 0 has told with all numbers; gives ``progress`` the session.

    Args:
        told: for each rank its host, its door and its number.
        number: this rank's own, which nobody knew before: without it in its place, all this may be
            of another meeting.
        rank: its place.
        size: number of ranks.
        progress: gets the session.

    Raises:
        WireError: rank 0 did not meet this rank, or no rank wrote this.
    """
    try:
        hosts, doors, numbers = zip(*(each.split("/") for each in told.split(" ")), strict=True)
        met = Met(tuple(map(int, hosts)), doors)
    except ValueError as error:
        raise _damaged(told) from error
    if len(doors) != size or numbers[rank] != number:
        raise _damaged(told)
    progress.session = hashlib.blake2b(told.encode(), person=b"objcomm session").hexdigest()
    return met


def call_the_roll(
    store: dist.Store, rank: int, size: int, seconds: float, turn: str
) -> tuple[int, ...]:
    """Return when every rank has called this, or who has not; nobody need have met before.

    Args:
        store: the ranks have it in common; rank 0 may be its host, and leaves last.
        rank: this one; 0 says when all have come, and when they have waited long enough.
        size: number of ranks.
        seconds: how long to wait at most.
        turn: of several that the same store may see.

    Returns:
        The ranks that have not come.
    """
    ours = dist.PrefixStore(f"{_PREFIX}/roll/{turn}", store)
    ours.set(f"came/{rank}", "")
    came = {each: f"came/{each}" for each in range(size)}
    expires = time.monotonic() + seconds
    pause = _PAUSE_MIN_SECONDS
    while not ours.check(["end"]):
        if rank == 0 and ours.check(list(came.values())):
            ours.set("end", "")
            return ()
        if time.monotonic() > expires:
            missing = tuple(each for each, key in came.items() if not ours.check([key]))
            if rank == 0:
                ours.set("end", " ".join(map(str, missing)))
                others = [each for each in came if each not in {0, *missing}]
                _await_readers(ours, [f"read/{each}" for each in others])
            return missing
        pause = _sleep(pause)
    told = (_read_text(ours, "end") or "").split()
    ours.set(f"read/{rank}", "")
    return tuple(map(int, told))


def _await_readers(store: dist.Store, keys: list[str]) -> None:
    """Keep the store until they have read why nobody waits any more, or are gone themselves."""
    expires = time.monotonic() + _READ_WITHIN_SECONDS
    while keys and not store.check(keys) and time.monotonic() < expires:
        time.sleep(_PAUSE_MAX_SECONDS)


def await_all(store: dist.Store, size: int) -> None:
    """Return when every rank has called this; it may be called again, in the same store.

    Args:
        store: the ranks have it in common; its time limit is the one that counts.
        size: number of ranks.

    Raises:
        TimeoutError: some ranks have not come.
    """
    came = store.add(f"{_PREFIX}/came", 1)
    key = f"{_PREFIX}/all came/{(came - 1) // size}"
    if came % size == 0:
        store.set(key, "")
        return
    limit: timedelta = store.timeout  # type: ignore[attr-defined]  # not in torch's stub
    seconds = limit.total_seconds()
    expires = time.monotonic() + seconds
    pause = _PAUSE_MIN_SECONDS
    try:
        while not store.check([key]):
            if time.monotonic() > expires:
                raise TimeoutError(
                    f"{size - came % size} of {size} ranks have not come within {seconds:g} s"
                )
            pause = _sleep(pause)
    except dist.DistNetworkError:
        return  # the store's host does not leave before all have come; if it died, calls say so


def _wait_for(
    store: dist.Store, key: str, progress: MeetingState, say_again: Callable[[], None] | None = None
) -> str:
    began = said = time.monotonic()
    pause = _PAUSE_MIN_SECONDS
    while (found := _read_text(store, key)) is None:
        progress.await_rank(0)
        pause = _sleep(pause)
        now = time.monotonic()
        if say_again is not None and now - said > max(_SAID_FOR_SECONDS, (now - began) / 10):
            # A thread that has given up may have said it, too, and been held up on its way.
            say_again()
            said = now
    progress.await_rank(0)  # an answer may have come to who had given up
    return found


def _read_text(store: dist.Store, key: str) -> str | None:
    found = read(store, key)
    try:
        return None if found is None else found.decode()
    except UnicodeDecodeError as error:
        raise _damaged(found) from error


def _damaged(found: object) -> WireError:
    """The error of a rank that read what no rank writes, such as another program's word."""
    return WireError(
        f"the store where ranks meet holds what no rank of objcomm wrote: {found!r:.80}"
    )


def _sleep(pause: float) -> float:
    time.sleep(pause)
    if pause < _PAUSE_MAX_SECONDS:
        return min(2 * pause, _PAUSE_MAX_SECONDS)
    return min(_GROWTH * pause, _LONG_PAUSE_SECONDS)
