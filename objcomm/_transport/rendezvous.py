"""Lets the ranks of a group agree on a name that none of their earlier groups had.

A store outlives process groups, and recreated groups get the same names. Keys of an earlier group,
even of one that crashed halfway, must not be taken for those of the new one. So each *guest*, that
is every rank but 0, writes a *hello* with a new random number, and rank 0, the *host*, answers it
under that number. When all guests have taken their answers, the host writes a *go* with the numbers
of all ranks.

A meeting has two names. Its nonce is rank 0's number, and names keys in the store. Its session is
computed from the numbers of all ranks, and signatures depend on it. A process that can write to the
store can answer a guest with the nonce of an earlier meeting, but no recorded message is signed for
a session that includes this guest's number.
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
from objcomm._transport.store import read, under
from objcomm.errors import WireError, ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator
    from datetime import timedelta

    from objcomm._observe.history import CallRecord
    from objcomm._transport.link import Link, LinkUnreachable
    from objcomm._transport.store import AnyStore


#: The name of the meeting in errors.
FIRST_USE = "first use of the group"

#: After this time the log reports which ranks have reached ``init`` and which have not.
REPORTED_AFTER_SECONDS = 10.0

_PREFIX = "objcomm"

# All guests append to this key, so that one query finds all of them.
_HELLOS = "hellos"

_GIVEN_UP = "given up"

_PAUSE_MIN_SECONDS = 0.0005
_PAUSE_MAX_SECONDS = 0.02
_LONG_PAUSE_SECONDS = 0.25
# The most queries per second that all waiting ranks together send to the store: a small part of
# what torch's TCPStore can answer.
_LOOKS_PER_SECOND = 4000
_HELLO_INTERVAL_SECONDS = 1.0
# To check whether its hello is still there, a guest reads all guests' hellos, 100 bytes each.
_HELLO_INTERVAL_FOR_EACH_SECONDS = 0.01
_READ_WITHIN_SECONDS = 5.0
# A pause is at most 2 % of the wait before it, because a rank that has waited for minutes is in no
# hurry.
_GROWTH = 1.02


class GivenUpError(Exception):
    """No rank waits for this meeting any more."""


class LeftError(Exception):
    """Another guest has left the call that this rank is also in.

    Attributes:
        message: the message that the guest left behind.
    """

    def __init__(self, message: bytes) -> None:
        super().__init__(message)
        self.message = message


class MeetingState:
    """The progress of a meeting, for threads that watch it.

    Attributes:
        nonce: its name in the store, once this rank knows it.
        session: what signatures depend on, once all have met.
        is_over: whether ``end`` was called.
        parting: the message that a guest leaves for the others if it leaves before the host
            arrives; set from outside, before ``end``.
        is_pair: whether two ranks meet for point-to-point messages.
        unreachable: which ranks could not reach each other, while another link is being tried.
        without_streams: why the ranks use a link that this rank's user has not chosen.
        check_blocks: called with the blocks around the waiting calls; ends the meeting if one of
            them has failed.
        unproven: the link on which the ranks prove who they are, while they do.
    """

    def __init__(self, rank: int, members: tuple[int, ...], *, is_pair: bool = False) -> None:
        """Create the state of a meeting that has not begun.

        Args:
            rank: this rank.
            members: the ranks that meet, the host first.
            is_pair: whether two ranks meet for point-to-point messages.
        """
        self.is_pair = is_pair
        self._members = members
        self.nonce = ""
        self.session = ""
        self.is_over = False
        self.parting = b""
        self.unreachable: LinkUnreachable | None = None
        self.without_streams = ""
        self.check_blocks: Callable[[set[str]], None] | None = None
        self.unproven: Link | None = None
        self._entries: list[CallRecord] = []
        self._awaits = members[1 if rank == members[0] else 0]

    def end(self) -> None:
        """End it from outside, including a wait for another rank's proof."""
        self.is_over = True
        link = self.unproven
        if link is not None:
            link.abort()

    def watch(self, entry: CallRecord) -> None:
        """Show in ``entry`` which rank this one awaits."""
        self._entries.append(entry)
        entry.awaits = self._awaits

    def look_around(self) -> None:
        """Before joining other ranks, raise if a failed block around the calls ends the meeting.

        A rank that failed has reported that before it left the block, and may be here with a call
        after the block, which must not meet a call inside it.

        Raises:
            GivenUpError: the meeting was ended.
        """
        blocks = {block for entry in self._entries for block in entry.blocks}
        if blocks and self.check_blocks is not None:
            self.check_blocks(blocks)
        if self.is_over:
            raise GivenUpError

    def await_rank(self, peer: int) -> None:
        """Record that this rank awaits another one.

        Args:
            peer: its position among the members.

        Raises:
            GivenUpError: the meeting was ended.
        """
        if self.is_over:
            raise GivenUpError
        self._awaits = self._members[peer]
        for entry in self._entries:
            entry.awaits = self._awaits


class Met(NamedTuple):
    """What the ranks have learned from each other.

    Attributes:
        hosts: host number of each member, counted from 0 in the order of first appearance.
        doors: where each member can be reached, as it has described it.
    """

    hosts: tuple[int, ...]
    doors: tuple[str, ...]


def meet(store: AnyStore, rank: int, size: int, meeting: MeetingState, door: str = "-") -> Met:
    """Meet all ranks, and agree on new names, stored in ``meeting``, and on the addresses.

    Every member must call this. It has no time limit; see ``MeetingState.end``.

    Args:
        store: the group's store.
        rank: this rank's position among the members; 0 is the host.
        size: number of members.
        meeting: shows other threads the progress.
        door: where the others can reach this rank; text without spaces.

    Returns:
        What all ranks have written.

    Raises:
        GivenUpError: the meeting was ended from outside.
        LeftError: another guest has ended the call before a host arrived.
        WireError: rank 0 did not meet this rank, or no rank wrote what the store contains.
    """
    ours = under(store, _PREFIX)
    if rank != 0:
        return _meet_as_guest(ours, rank, size, meeting, door)
    return _meet_as_host(ours, size, meeting, door)


def forget(store: AnyStore, nonce: str, size: int, left: Iterable[str]) -> None:
    """Clean up; every rank calls this when it is connected, and the last one removes the keys.

    Args:
        store: as passed to ``meet``.
        nonce: of the meeting.
        size: number of members.
        left: keys that the link has left behind in this store.
    """
    ours = under(store, _PREFIX)
    if ours.add(f"connected/{nonce}", 1) < size:
        return
    for key in (f"connected/{nonce}", f"go/{nonce}"):
        ours.delete_key(key)
    for key in left:
        store.delete_key(key)


def _meet_as_host(store: AnyStore, size: int, meeting: MeetingState, door: str) -> Met:
    nonce = meeting.nonce = uuid.uuid4().hex
    answered: dict[int, dict[str, str]] = {peer: {} for peer in range(1, size)}
    try:
        joined = _answer(store, meeting, answered)
    except GivenUpError:
        if meeting.is_pair and any(answered.values()):  # the guest waits for no other rank
            store.set(f"go/{nonce}", _GIVEN_UP)
        raise
    # A hello that is appended now is lost, but guests repeat theirs.
    store.delete_key(_HELLOS)
    store.delete_key(f"joined/{nonce}")
    for peer, hellos in answered.items():
        for number in hellos:
            if number != joined[peer]:  # no rank has read it
                store.delete_key(f"welcome/{number}")
    taken = [nonce, *(joined[peer] for peer in answered)]
    places = [answered[peer][joined[peer]].partition(" ") for peer in answered]
    names = [machine(), *(name for name, _, _ in places)]
    doors = [door, *(each for _, _, each in places)]
    hosts = {name: number for number, name in enumerate(dict.fromkeys(names))}
    agreed = " ".join(
        f"{hosts[name]}/{each}/{number}"
        for name, each, number in zip(names, doors, taken, strict=True)
    )
    store.set(f"go/{nonce}", agreed)
    return _agreed(agreed, taken[0], door, 0, size, meeting)


def _answer(
    store: AnyStore, meeting: MeetingState, answered: dict[int, dict[str, str]]
) -> dict[int, str]:
    """Answer all guests until each has joined; return the number with which each did.

    Each round takes two queries to the store, however many guests there are.

    Args:
        store: the store of the meeting.
        meeting: shows which rank this one awaits.
        answered: gets, for each guest, the numbers that were answered, with its machine and door.
    """
    nonce = meeting.nonce
    joined: dict[int, str] = {}
    seen_hellos = seen_joined = ""
    pause = _PAUSE_MIN_SECONDS
    while missing := [peer for peer in answered if peer not in joined]:
        meeting.await_rank(missing[0])
        if (hellos := _read_text(store, _HELLOS) or "") != seen_hellos:
            seen_hellos = hellos
            new = []
            for peer, number, place in _entries(hellos, answered):
                if number not in answered[peer]:  # a stale hello is answered, too, without effect
                    answered[peer][number] = place
                    new.append(f"welcome/{number}")
            if new:
                meeting.look_around()
                store.multi_set(new, [nonce] * len(new))
                pause = _PAUSE_MIN_SECONDS
        if (entries := _read_text(store, f"joined/{nonce}") or "") != seen_joined:
            seen_joined = entries
            for peer, number, _ in _entries(entries, answered):
                if number not in answered[peer]:
                    raise damaged(number)
                joined[peer] = number
        if len(joined) < len(answered):
            pause = _sleep(pause)
    return joined


def _entries(text: str, guests: Container[int]) -> Iterator[tuple[int, str, str]]:
    """Yield what guests have appended to a key: the rank, its number, and the rest.

    Raises:
        WireError: no rank wrote one of the entries.
    """
    for entry in text.splitlines():
        peer, _, tail = entry.partition(" ")
        number, _, rest = tail.partition(" ")
        if not peer.isdecimal() or int(peer) not in guests or not number:
            raise damaged(entry)
        yield int(peer), number, rest


def _append(store: AnyStore, key: str, entry: str) -> None:
    """Append an entry in one step to a key, which need not exist yet.

    If the store lacks that operation, compare_set does it. Torch's own fallback (2.13) loops
    forever if another rank removes the key in the meantime.
    """
    if store.has_extended_api():
        store.append(key, entry)
        return
    found = ""
    while (standing := store.compare_set(key, found, found + entry).decode()) != found + entry:
        found = "" if standing == found else standing  # equal: the key was removed


def _meet_as_guest(store: AnyStore, rank: int, size: int, meeting: MeetingState, door: str) -> Met:
    while True:
        number = uuid.uuid4().hex
        hello = f"{rank} {number} {machine()} {door}\n"
        _append(store, _HELLOS, hello)
        say_again = functools.partial(_say_again, store, hello)
        try:
            nonce = _wait_for(store, f"welcome/{number}", size, meeting, say_again)
        except GivenUpError:
            if meeting.parting:
                _leave_message(store, size, rank, number, meeting.parting)
            raise
        if nonce.startswith(_GIVEN_UP):
            store.delete_key(f"welcome/{number}")
            try:
                message = bytes.fromhex(nonce.removeprefix(_GIVEN_UP))
            except ValueError as error:
                raise damaged(nonce) from error
            raise LeftError(message)
        meeting.look_around()
        meeting.nonce = nonce
        store.delete_key(f"welcome/{number}")
        _append(store, f"joined/{nonce}", f"{rank} {number}\n")
        agreed = _wait_for(store, f"go/{nonce}", size, meeting)
        if agreed != _GIVEN_UP:
            return _agreed(agreed, number, door, rank, size, meeting)
        for key in (f"joined/{nonce}", f"go/{nonce}"):
            store.delete_key(key)


def _leave_message(store: AnyStore, size: int, rank: int, own: str, message: bytes) -> None:
    """Leave a message for the other guests if no host has arrived."""
    if store.check([f"welcome/{own}"]):
        return
    for peer, number, _ in _entries(_read_text(store, _HELLOS) or "", range(1, size)):
        if peer != rank:  # this rank may already have written a new hello
            store.compare_set(f"welcome/{number}", "", _GIVEN_UP + message.hex())


def _agreed(  # noqa: PLR0917  # all take part in one check
    agreed: str, number: str, door: str, rank: int, size: int, meeting: MeetingState
) -> Met:
    """Check and return what rank 0 has written; set the session of ``meeting``.

    Args:
        agreed: host, door and number of each rank.
        number: this rank's number, which nobody knew before. If it is not in its place, all this
            may be from another meeting.
        door: this rank's door. If another one is in its place, someone wants the others to call
            there in order to relay their messages.
        rank: this rank's position.
        size: number of ranks.
        meeting: gets the session.

    Raises:
        WireError: rank 0 did not meet this rank, or no rank wrote this.
    """
    try:
        hosts, doors, numbers = zip(*(each.split("/") for each in agreed.split(" ")), strict=True)
        met = Met(tuple(map(int, hosts)), doors)
    except ValueError as error:
        raise damaged(agreed) from error
    if len(doors) != size or (numbers[rank], doors[rank]) != (number, door):
        raise damaged(agreed)
    meeting.session = hashlib.blake2b(agreed.encode(), person=b"objcomm session").hexdigest()
    return met


def _say_again(store: AnyStore, hello: str) -> None:
    """Repeat the hello if the host of a meeting that has just ended has removed it."""
    if hello not in (_read_text(store, _HELLOS) or ""):
        _append(store, _HELLOS, hello)


def call_the_roll(
    store: dist.Store, rank: int, size: int, seconds: float, turn: str
) -> tuple[int, ...]:
    """Wait for every rank to call this; the ranks need not have met before.

    Args:
        store: shared by the ranks; rank 0 may host it, and leaves last.
        rank: this rank; rank 0 announces that all have arrived, or that the wait is over.
        size: number of ranks.
        seconds: how long to wait at most.
        turn: distinguishes this call from others in the same store.

    Returns:
        The ranks that have not arrived.
    """
    ours = under(store, f"{_PREFIX}/roll/{turn}")
    _append(ours, "came", f"{rank} come\n")

    def missing() -> tuple[int, ...]:
        text = _read_text(ours, "came") or ""
        came = {each for each, _, _ in _entries(text, range(size))}
        return tuple(each for each in range(size) if each not in came)

    began = time.monotonic()
    expires = began + seconds
    pause = _PAUSE_MIN_SECONDS
    is_reported = False
    while not ours.check(["end"]):
        has_expired = time.monotonic() > expires
        if not is_reported and time.monotonic() > began + REPORTED_AFTER_SECONDS:
            is_reported = True
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
    absent_ranks = (_read_text(ours, "end") or "").split()
    ours.set(f"read/{rank}", "")
    return tuple(map(int, absent_ranks))


def _await_readers(store: AnyStore, keys: list[str]) -> None:
    """Keep the store alive until the ranks have read the outcome, or for a few seconds."""
    expires = time.monotonic() + _READ_WITHIN_SECONDS
    while keys and not store.check(keys) and time.monotonic() < expires:
        time.sleep(_PAUSE_MAX_SECONDS)


def await_all(store: dist.Store, size: int) -> None:
    """Wait until every rank has called this; may be called again with the same store.

    Args:
        store: shared by the ranks; its timeout applies.
        size: number of ranks.

    Raises:
        TimeoutError: some ranks have not arrived.
    """
    came = store.add(f"{_PREFIX}/came", 1)
    key = f"{_PREFIX}/all came/{(came - 1) // size}"
    if came % size == 0:
        store.set(key, "")
        return
    limit: timedelta = store.timeout  # type: ignore[attr-defined]  # not in torch's stubs
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
        return  # its host leaves after all have arrived; if it died, later calls report that


def _wait_for(
    store: AnyStore,
    key: str,
    size: int,
    meeting: MeetingState,
    say_again: Callable[[], None] | None = None,
) -> str:
    """Return the value of a key as soon as it exists.

    Args:
        store: the store to query.
        key: a key for which only this rank waits, or all ranks do.
        size: number of ranks that wait for something in this store.
        meeting: shows whether to keep waiting.
        say_again: called now and then.
    """
    began = sent_at = time.monotonic()
    pause = _PAUSE_MIN_SECONDS
    while (found := _read_text(store, key)) is None:
        meeting.await_rank(0)
        pause = _sleep(pause, size)
        now = time.monotonic()
        interval = max(
            _HELLO_INTERVAL_SECONDS, size * _HELLO_INTERVAL_FOR_EACH_SECONDS, (now - began) / 10
        )
        if say_again is not None and now - sent_at > interval:
            say_again()
            sent_at = now
    meeting.await_rank(0)  # the answer may have come after this rank gave up
    return found


def _read_text(store: AnyStore, key: str) -> str | None:
    found = read(store, key)
    try:
        return None if found is None else found.decode()
    except UnicodeDecodeError as error:
        raise damaged(found) from error


def damaged(found: object) -> WireError:
    """Return the error for a value that no rank has written, such as another program's."""
    return WireError(
        f"the store where ranks meet holds data that objcomm did not write: {found!r:.80}"
    )


def _sleep(pause: float, size: int = 1) -> float:
    """Pause between two queries of one of ``size`` waiting ranks; return the next pause."""
    time.sleep(pause)
    longest = max(_PAUSE_MAX_SECONDS, size / _LOOKS_PER_SECOND)
    if pause < longest:
        return min(2 * pause, longest)
    return min(_GROWTH * pause, max(longest, _LONG_PAUSE_SECONDS))
