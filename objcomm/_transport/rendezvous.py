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
from objcomm._observe.log import log
from objcomm._transport.store import read
from objcomm.errors import WireError, ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator
    from datetime import timedelta

    from objcomm._observe.history import CallRecord
    from objcomm._transport.link import Link, LinkUnreachable


#: What errors call the meeting.
FIRST_USE = "first use of the group"

#: After so long the log says which ranks have come to ``init`` and which have not.
REPORTED_AFTER_SECONDS = 10.0

_PREFIX = "objcomm"

# Guests add to it, one after another, so that one look finds all.
_HELLOS = "hellos"

_GIVEN_UP = "given up"

_PAUSE_MIN_SECONDS = 0.0005
_PAUSE_MAX_SECONDS = 0.02
_LONG_PAUSE_SECONDS = 0.25
# So that the store serves so many looks a second at most, however many ranks wait: a small part of
# what torch's TCPStore does.
_LOOKS_PER_SECOND = 4000
_SAID_FOR_SECONDS = 1.0
# To look whether it was heard a guest reads what all guests have said: 100 bytes of each.
_SAID_FOR_EACH_SECONDS = 0.01
_READ_WITHIN_SECONDS = 5.0
# So a pause is at most 2 % of the wait before it: who has waited for minutes is in no hurry.
_GROWTH = 1.02


class GivenUpError(Exception):
    """Nobody waits for this meeting any more."""


class LeftError(Exception):
    """Another guest has left, and its call with it, which is this rank's call too.

    Attributes:
        word: what that guest has left behind.
    """

    def __init__(self, word: bytes) -> None:
        super().__init__(word)
        self.word = word


class MeetingState:
    """How far a meeting has come, for whoever watches it from another thread.

    Attributes:
        nonce: the name in the store, once this rank knows it.
        session: what signatures are bound to, once all have met.
        is_over: whether it was ended from outside, by ``end``.
        parting: what a guest shall leave for the others if it leaves before the host has come; set
            from outside, before ``end``.
        is_pair: whether two meet for messages from rank to rank.
        unreachable: which ranks could not reach each other, where another link is being tried.
        without_streams: why the ranks have got another link than this one's user has chosen.
        heed: given the blocks around the calls that wait, ends the meeting if one has failed.
        unproven: the link over which the ranks prove who they are, while they do.
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
        self.parting = b""
        self.unreachable: LinkUnreachable | None = None
        self.without_streams = ""
        self.heed: Callable[[set[str]], None] | None = None
        self.unproven: Link | None = None
        self._entries: list[CallRecord] = []
        self._awaits = members[1 if rank == members[0] else 0]

    def end(self) -> None:
        """End it from outside; a thread that waits for another rank's proof waits no longer."""
        self.is_over = True
        link = self.unproven
        if link is not None:
            link.abort()

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
        doors: where each member can be reached, in its own words.
    """

    hosts: tuple[int, ...]
    doors: tuple[str, ...]


def meet(store: dist.Store, rank: int, size: int, meeting: MeetingState, door: str = "-") -> Met:
    """Meet all ranks and agree on names that are new, which ``meeting`` gets, and on the places.

    Every member must call this. It has no limit of its own: see ``MeetingState.end``.

    Args:
        store: the group's own.
        rank: this one's position among the members; 0 is the host.
        size: number of members.
        meeting: tells others how far it has come.
        door: what the others are told of where this rank can be reached; one word.

    Returns:
        What all have told.

    Raises:
        GivenUpError: it was ended from outside.
        LeftError: another guest has ended the call, and no host had come.
        WireError: rank 0 did not meet this rank, or no rank wrote what stands in the store.
    """
    ours = dist.PrefixStore(_PREFIX, store)
    if rank != 0:
        return _meet_as_guest(ours, rank, size, meeting, door)
    return _meet_as_host(ours, size, meeting, door)


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


def _meet_as_host(store: dist.Store, size: int, meeting: MeetingState, door: str) -> Met:
    nonce = meeting.nonce = uuid.uuid4().hex
    answered: dict[int, dict[str, str]] = {peer: {} for peer in range(1, size)}
    try:
        joined = _answer(store, meeting, answered)
    except GivenUpError:
        if meeting.is_pair and any(answered.values()):  # the guest has nobody else to wait for
            store.set(f"go/{nonce}", _GIVEN_UP)
        raise
    # A hello that another guest adds meanwhile is lost, and it says so once more.
    store.delete_key(_HELLOS)
    store.delete_key(f"joined/{nonce}")
    for peer, hellos in answered.items():
        for number in hellos:
            if number != joined[peer]:  # nobody has read it
                store.delete_key(f"welcome/{number}")
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
    return _agreed(told, taken[0], door, 0, size, meeting)


def _answer(
    store: dist.Store, meeting: MeetingState, answered: dict[int, dict[str, str]]
) -> dict[int, str]:
    """Answer all guests until each has joined; returns under which number each did.

    However many they are, each look takes two questions to the store.

    Args:
        store: theirs.
        meeting: tells whom this rank awaits.
        answered: gets, of each guest, the numbers that were answered, with its machine.
    """
    nonce = meeting.nonce
    joined: dict[int, str] = {}
    heard = told = ""
    pause = _PAUSE_MIN_SECONDS
    while missing := [peer for peer in answered if peer not in joined]:
        meeting.await_rank(missing[0])
        if (hellos := _read_text(store, _HELLOS) or "") != heard:
            heard = hellos
            new = []
            for peer, number, place in _entries(hellos, answered):
                if number not in answered[peer]:  # a stale hello is answered too, to nobody
                    answered[peer][number] = place
                    new.append(f"welcome/{number}")
            if new:
                meeting.look_around()
                store.multi_set(new, [nonce] * len(new))  # type: ignore[attr-defined]  # not in torch's stub
                pause = _PAUSE_MIN_SECONDS
        if (entries := _read_text(store, f"joined/{nonce}") or "") != told:
            told = entries
            for peer, number, _ in _entries(entries, answered):
                if number not in answered[peer]:
                    raise damaged(number)
                joined[peer] = number
        if len(joined) < len(answered):
            pause = _sleep(pause)
    return joined


def _entries(text: str, guests: Container[int]) -> Iterator[tuple[int, str, str]]:
    """What guests have added to a key, one after another: who, its number, and the rest.

    Raises:
        WireError: no rank wrote one of them.
    """
    for entry in text.splitlines():
        peer, _, said = entry.partition(" ")
        number, _, rest = said.partition(" ")
        if not peer.isdecimal() or int(peer) not in guests or not number:
            raise damaged(entry)
        yield int(peer), number, rest


def _append(store: dist.Store, key: str, entry: str) -> None:
    """Add an entry to what stands under a key, if anything does, in one step.

    A store without an operation for that gets it by comparing. Torch does so as well, but it tries
    on for ever where another rank removes the key meanwhile (2.13).
    """
    if store.has_extended_api():  # type: ignore[attr-defined]  # not in torch's stub
        store.append(key, entry)  # type: ignore[attr-defined]  # likewise
        return
    found = ""
    while (standing := store.compare_set(key, found, found + entry).decode()) != found + entry:
        found = "" if standing == found else standing  # the same: it was removed


def _meet_as_guest(
    store: dist.Store, rank: int, size: int, meeting: MeetingState, door: str
) -> Met:
    while True:
        number = uuid.uuid4().hex
        hello = f"{rank} {number} {machine()} {door}\n"
        _append(store, _HELLOS, hello)
        say_again = functools.partial(_say_again, store, hello)
        try:
            nonce = _wait_for(store, f"welcome/{number}", size, meeting, say_again)
        except GivenUpError:
            if meeting.parting:
                _leave_word(store, size, rank, number, meeting.parting)
            raise
        if nonce.startswith(_GIVEN_UP):
            store.delete_key(f"welcome/{number}")
            try:
                word = bytes.fromhex(nonce.removeprefix(_GIVEN_UP))
            except ValueError as error:
                raise damaged(nonce) from error
            raise LeftError(word)
        meeting.look_around()
        meeting.nonce = nonce
        store.delete_key(f"welcome/{number}")
        _append(store, f"joined/{nonce}", f"{rank} {number}\n")
        told = _wait_for(store, f"go/{nonce}", size, meeting)
        if told != _GIVEN_UP:
            return _agreed(told, number, door, rank, size, meeting)
        for key in (f"joined/{nonce}", f"go/{nonce}"):
            store.delete_key(key)


def _leave_word(store: dist.Store, size: int, rank: int, own: str, word: bytes) -> None:
    """Answer the other guests, if no host has come."""
    if store.check([f"welcome/{own}"]):
        return
    for peer, number, _ in _entries(_read_text(store, _HELLOS) or "", range(1, size)):
        if peer != rank:  # it may be here once more by now
            store.compare_set(f"welcome/{number}", "", _GIVEN_UP + word.hex())


def _agreed(  # noqa: PLR0917  # what this rank has told, and what it gets
    told: str, number: str, door: str, rank: int, size: int, meeting: MeetingState
) -> Met:
    """What rank 0 has told with all numbers; gives ``meeting`` the session.

    Args:
        told: for each rank its host, its door and its number.
        number: this rank's own, which nobody knew before: without it in its place, all this may be
            of another meeting.
        door: this rank's own: with another one in its place, somebody wants the others to call
            there, and to pass on what they say.
        rank: its place.
        size: number of ranks.
        meeting: gets the session.

    Raises:
        WireError: rank 0 did not meet this rank, or no rank wrote this.
    """
    try:
        hosts, doors, numbers = zip(*(each.split("/") for each in told.split(" ")), strict=True)
        met = Met(tuple(map(int, hosts)), doors)
    except ValueError as error:
        raise damaged(told) from error
    if len(doors) != size or (numbers[rank], doors[rank]) != (number, door):
        raise damaged(told)
    meeting.session = hashlib.blake2b(told.encode(), person=b"objcomm session").hexdigest()
    return met


def _say_again(store: dist.Store, hello: str) -> None:
    """Say hello once more, if the host of a meeting that has just ended has removed the first."""
    if hello not in (_read_text(store, _HELLOS) or ""):
        _append(store, _HELLOS, hello)


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
    _append(ours, "came", f"{rank} come\n")

    def missing() -> tuple[int, ...]:
        text = _read_text(ours, "came") or ""
        came = {each for each, _, _ in _entries(text, range(size))}
        return tuple(each for each in range(size) if each not in came)

    began = time.monotonic()
    expires = began + seconds
    pause = _PAUSE_MIN_SECONDS
    is_said = False
    while not ours.check(["end"]):
        has_expired = time.monotonic() > expires
        if not is_said and time.monotonic() > began + REPORTED_AFTER_SECONDS:
            is_said = True
            absent = missing()
            come = [each for each in range(size) if each not in absent]
            if rank == come[0] and absent:  # one of them is enough
                both = ranks_text(absent), ranks_text(come)
                log.warning("init: still waiting for %s; here so far: %s", *both)
        if rank == 0 or has_expired:
            absent = missing()
            if rank == 0 and (has_expired or not absent):
                ours.set("end", " ".join(map(str, absent)))
                others = [each for each in range(1, size) if each not in absent]
                _await_readers(ours, [f"read/{each}" for each in others] if absent else [])
            if has_expired or not absent:
                return absent
        pause = _sleep(pause, 1 if rank == 0 else size)
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
                    f"{size - came % size} of {size} ranks have not arrived within {seconds:g} s"
                )
            pause = _sleep(pause, size)
    except dist.DistNetworkError:
        return  # the store's host does not leave before all have come; if it died, calls say so


def _wait_for(
    store: dist.Store,
    key: str,
    size: int,
    meeting: MeetingState,
    say_again: Callable[[], None] | None = None,
) -> str:
    """What stands under a key, once something does.

    Args:
        store: where.
        key: only this rank, or all, wait for it.
        size: how many ranks wait for something in this store.
        meeting: tells whether to wait on.
        say_again: to be done now and then.
    """
    began = said = time.monotonic()
    pause = _PAUSE_MIN_SECONDS
    while (found := _read_text(store, key)) is None:
        meeting.await_rank(0)
        pause = _sleep(pause, size)
        now = time.monotonic()
        often = max(_SAID_FOR_SECONDS, size * _SAID_FOR_EACH_SECONDS, (now - began) / 10)
        if say_again is not None and now - said > often:
            say_again()
            said = now
    meeting.await_rank(0)  # an answer may have come to who had given up
    return found


def _read_text(store: dist.Store, key: str) -> str | None:
    found = read(store, key)
    try:
        return None if found is None else found.decode()
    except UnicodeDecodeError as error:
        raise damaged(found) from error


def damaged(found: object) -> WireError:
    """The error of a rank that read what no rank writes, such as another program's word."""
    return WireError(
        f"the store where ranks meet holds data that objcomm did not write: {found!r:.80}"
    )


def _sleep(pause: float, size: int = 1) -> float:
    """Pause between two looks of one of ``size`` ranks that look; returns the next pause."""
    time.sleep(pause)
    longest = max(_PAUSE_MAX_SECONDS, size / _LOOKS_PER_SECOND)
    if pause < longest:
        return min(2 * pause, longest)
    return min(_GROWTH * pause, max(longest, _LONG_PAUSE_SECONDS))
