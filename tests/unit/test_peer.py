"""The protocol over a stream, without a stream: any split of the bytes, order of events, or lie."""

import itertools
import math
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objcomm._codecs.buffers import allocate
from objcomm._transport import peer
from objcomm._transport.frames import (
    AHEAD_MAX,
    AHEAD_MAX_NBYTES,
    CREDIT_EACH,
    FAREWELL_MAX_NBYTES,
    HEADER,
    LENT_FILES_MAX,
    TINY_MAX_NBYTES,
    UNASKED_MAX_NBYTES,
    WAITING_LANES_MAX,
    WAITING_MAX,
    Kind,
    may_be_ahead,
)
from objcomm._transport.link import LinkClosed, head_tag, payload_tag
from objcomm._transport.peer import Peer
from objcomm._transport.pending import Attendance, Awaited, Lent, Loan, Members, Transfer
from tests.unit.stream_links import HEAD, TAG, filled, frame, members, room

_NO_LINK = "which objcomm never does"


def share(count: int = 1, *, is_sealed: bool = True) -> Any:
    """Return a share without a file, with all that a peer reads."""
    return SimpleNamespace(descriptors=[*range(count)], is_fixed=lambda: is_sealed)


def send(sender: Peer, message: bytes, tag: int) -> Transfer:
    """Begin to send, on a system that has no room at first."""
    transfer = Transfer(message)
    head = sender.head_of(len(message), tag)
    if head:
        sender.queue(head, transfer)
    else:
        sender.hold(transfer, tag)
    return transfer


def carry(sender: Peer, receiver: Peer, most: float = math.inf) -> int:
    """Move at most ``most`` bytes as a stream does, and return how many were moved."""
    carried = 0
    while carried < most and not receiver.ended and (first := sender.first_out()) is not None:
        view, _, lent = first
        count = int(min(len(view), most - carried))
        piece = bytes(view[:count])
        if lent is not None and count:
            receiver.descriptors.append(lent)
        sender.sent(count)
        feed(receiver, piece)
        carried += count
    return carried


def feed(receiver: Peer, came: bytes, split: int = 1 << 30) -> None:
    """Deliver bytes, at most ``split`` at a time."""
    left = memoryview(came)
    while left and not receiver.ended:
        into = receiver.room()
        count = min(len(left), len(into), split)
        assert count
        into[:count] = left[:count]
        left = left[count:]
        receiver.received(count)


def carry_all(one: Peer, other: Peer) -> None:
    while carry(one, other) + carry(other, one):
        pass


def test_how_many_messages_and_bytes_may_be_ahead() -> None:
    assert may_be_ahead([], UNASKED_MAX_NBYTES)
    assert may_be_ahead([0] * (AHEAD_MAX - 1), 0)
    assert not may_be_ahead([0] * AHEAD_MAX, 0)
    assert may_be_ahead([AHEAD_MAX_NBYTES - 9], 9)
    assert not may_be_ahead([AHEAD_MAX_NBYTES - 9], 10)


# ---------------------------------------------------------------- two peers that keep the protocol

_TAGS = (head_tag(0), head_tag(3), payload_tag(0, 1), payload_tag(3, 1))
_LENGTHS = st.one_of(
    st.integers(0, TINY_MAX_NBYTES + 2),
    st.sampled_from([HEADER.size, 70_000, (1 << 17) - HEADER.size, 1 << 17, 400_000]),
)
_CARRIED = [1, 7, 23, 9_999, 1 << 20]
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, 1), st.sampled_from(_TAGS), _LENGTHS),
        st.tuples(st.just("recv"), st.integers(0, 1), st.sampled_from(_TAGS), st.just(0)),
        st.tuples(st.just("carry"), st.integers(0, 1), st.just(0), st.sampled_from(_CARRIED)),
    ),
    max_size=60,
)


@given(_STEPS)
def test_messages_arrive_whole_and_in_order(steps: Sequence[tuple[str, int, int, int]]) -> None:
    sides = Peer(1), Peer(0)
    going: list[Transfer] = []
    sent: defaultdict[tuple[int, int], list[bytes]] = defaultdict(list)
    into: defaultdict[tuple[int, int], list[Transfer]] = defaultdict(list)

    def recv(side: int, tag: int) -> None:
        transfer = Transfer(room(400_001))
        into[side, tag].append(transfer)
        sides[side].post(transfer, tag)

    for what, side, tag, number in steps:
        if what == "send":
            message = bytes([1 + len(going) % 255]) * number
            going.append(send(sides[side], message, tag))
            sent[1 - side, tag].append(message)
        elif what == "recv":
            recv(side, tag)
        else:
            carry(sides[side], sides[1 - side], number)
    for (side, tag), messages in sent.items():
        while len(into[side, tag]) < len(messages):
            recv(side, tag)
    carry_all(*sides)
    assert [each.ended for each in sides] == ["", ""]
    assert all(each.is_over and not each.reason for each in going)
    for where, transfers in into.items():
        messages = sent[where]
        for at, transfer in enumerate(transfers):
            assert transfer.is_over == (at < len(messages))
            wanted = messages[at] if transfer.is_over else b""
            assert bytes(transfer.view[: len(wanted)]) == wanted
            assert not any(transfer.view[len(wanted) : len(wanted) + 1])


@given(st.lists(st.integers(0, UNASKED_MAX_NBYTES), max_size=12), st.integers(0, 4))
def test_first_messages_never_wait_for_what_was_taken(lengths: list[int], delay: int) -> None:
    """The sender gets credit in time, whatever the lengths are."""
    one, other = Peer(1), Peer(0)
    for nbytes in lengths:
        send(one, bytes(nbytes), HEAD)
    carry(one, other, delay << 18)
    for nbytes in lengths:
        carry_all(one, other)
        assert other.take(HEAD) == bytes(nbytes)


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans(), st.booleans()), max_size=30))
def test_lent_memory_is_mapped_or_copied(loans: list[tuple[int, bool, bool]]) -> None:
    """Some of it has files, some files get lost on the way, and all of it arrives."""
    one, other = Peer(1), Peer(0)
    lent, borrowed = [], []
    for nbytes, has_files, gets_lost in loans:
        flats = members(nbytes, 0, 3)
        transfer = Lent(share(2) if has_files else None, flats)
        one.lend(transfer, TAG)
        lent.append(transfer)
        loan = Loan(nbytes + 3, 0)
        borrowed.append((loan, flats))
        other.post(loan, TAG)
        while carry(one, other, 5):
            if gets_lost and other.descriptors:
                other.descriptors[-1] = None
    carry_all(one, other)
    for loan, flats in borrowed:
        assert loan.is_over
        if loan.share is None:
            copy = Members([room(len(flat)) for flat in flats])
            other.take_offer(copy, loan.number)
            carry_all(one, other)
            assert copy.is_over
            assert [bytes(each) for each in copy.views] == [bytes(flat.numpy()) for flat in flats]
    assert all(each.is_over and not each.reason for each in lent)
    assert not one.ended + other.ended


def test_no_more_files_than_may_wait_are_lent() -> None:
    one = Peer(1)
    lent = [Lent(share(), members(9)) for _ in range(LENT_FILES_MAX + 3)]
    for each in lent:
        one.lend(each, TAG)
    assert [each.share is not None for each in lent] == [True] * LENT_FILES_MAX + [False] * 3


def test_files_that_the_peer_has_received_make_room_for_more_and_are_answered_once() -> None:
    one, other = Peer(1), Peer(0)
    for _ in range(LENT_FILES_MAX + 1):
        lent = Lent(share(), members(9))
        one.lend(lent, TAG)
        assert lent.share is not None
        other.post(Loan(9, 0), TAG)
        carry_all(one, other)
    feed(one, frame(Kind.HELD, number=1))
    assert "an answer to an offer that was not made" in one.ended


@pytest.mark.parametrize("split", [1, 30, 1 << 30])
def test_an_offer_may_reuse_the_number_of_one_that_has_arrived(split: int) -> None:
    one = Peer(1)
    for _ in range(2):
        into = Transfer(room(9))
        one.post(into, TAG)
        feed(one, frame(Kind.OFFER, TAG, 9, 5) + frame(Kind.CONTENT, number=5), split)
        feed(one, b"123456789", split)
        assert bytes(into.view) == b"123456789"
    assert not one.ended


def test_messages_overtake_content_only_between_frames() -> None:
    one, other = Peer(1), Peer(0)
    much = send(one, bytes(100_000), TAG)
    into = Transfer(room(100_000))
    other.post(into, TAG)
    carry(one, other)  # the offer
    carry(other, one)  # its answer
    assert carry(one, other, HEADER.size - 1)  # a part of the content's header
    send(one, b"first", HEAD)
    carry(one, other, 1 + 100_000)
    assert much.is_over
    assert into.is_over
    assert other.take(HEAD) is None
    carry(one, other)
    assert other.take(HEAD) == b"first"


def test_an_answer_also_gives_credit() -> None:
    """A separate frame would wake the sender."""
    one = Peer(1)
    feed(one, frame(Kind.MESSAGE, HEAD, 1) + b"a")
    assert one.take(HEAD) == b"a"
    assert one.first_out() is None
    assert one.head_of(1, HEAD) == frame(Kind.MESSAGE, HEAD, 1, 1)
    assert one.head_of(1, HEAD) == frame(Kind.MESSAGE, HEAD, 1)


@pytest.mark.parametrize("is_posted", [False, True])
def test_many_small_messages_or_a_large_one_give_credit(*, is_posted: bool) -> None:
    one = Peer(1)

    def receive(nbytes: int) -> None:
        if is_posted:
            one.post(Transfer(room(nbytes + 1)), HEAD)
        feed(one, frame(Kind.MESSAGE, HEAD, nbytes) + bytes(nbytes))
        assert is_posted or one.take(HEAD) == bytes(nbytes)

    for _ in range(CREDIT_EACH):
        assert one.first_out() is None
        receive(0)
    assert one.outgoing.popleft()[0] == frame(Kind.CREDIT, HEAD, number=CREDIT_EACH)
    receive(100_000)
    assert one.outgoing.popleft()[0] == frame(Kind.CREDIT, HEAD, number=1)


def test_credit_that_comes_with_a_message_releases_held_ones_and_is_given_once() -> None:
    one = Peer(1)
    sent = [send(one, bytes([each]), HEAD) for each in range(AHEAD_MAX + 2)]
    while one.first_out() is not None:
        one.sent(len(one.outgoing[0][0]))
    feed(one, frame(Kind.MESSAGE, HEAD, number=1))
    assert one.take(HEAD) == b""
    outgoing = [bytes(each) for each, *_ in one.outgoing]
    assert outgoing == [frame(Kind.MESSAGE, HEAD, 1), bytes([AHEAD_MAX])]
    assert [each.is_over for each in sent] == [True] * AHEAD_MAX + [False] * 2
    one.outgoing.clear()
    feed(one, frame(Kind.CREDIT, HEAD, number=2))
    assert one.outgoing.popleft()[0] == frame(Kind.MESSAGE, HEAD, 1, 1)
    assert one.head_of(0, HEAD) == frame(Kind.MESSAGE, HEAD)
    assert one.head_of(0, HEAD) == b""


def test_how_long_a_message_may_be_that_was_not_requested() -> None:
    tiny, unasked = TINY_MAX_NBYTES, UNASKED_MAX_NBYTES
    assert Peer(1).head_of(tiny, TAG) == frame(Kind.MESSAGE, TAG, tiny)
    assert Peer(1).head_of(tiny + 1, TAG) == b""
    assert Peer(1).head_of(unasked, HEAD) == frame(Kind.MESSAGE, HEAD, unasked)


@pytest.mark.parametrize("make", [Transfer, lambda _: Members([b"ab", b"c", b"def"])])
@pytest.mark.parametrize("sent", range(HEADER.size + 6))
def test_the_rest_of_a_partly_sent_message_goes_out(
    make: Callable[[bytes], Transfer], sent: int
) -> None:
    one, whole, transfer = Peer(1), frame(Kind.MESSAGE, HEAD, 6) + b"abcdef", make(b"abcdef")
    one.queue(one.head_of(6, HEAD), transfer, sent)
    assert b"".join(each for each, *_ in one.outgoing) == whole[sent:]
    while (first := one.first_out()) is not None:
        assert not transfer.is_over
        one.sent(len(first[0]))
    assert transfer.is_over


def test_as_much_as_is_allowed_may_wait_and_what_was_taken_makes_room() -> None:
    """This covers small messages and mapped memory, whose numbers may be used again."""
    one, into = Peer(1), Transfer(room(1))
    for _ in range(2):
        feed(one, frame(Kind.MESSAGE, TAG) * WAITING_MAX)
        for _ in range(WAITING_MAX):
            one.post(into, TAG)
    for number in 2 * [*range(LENT_FILES_MAX + 1)]:
        one.descriptors.append(share())
        feed(one, frame(Kind.SHARE, TAG, 9, number))
        one.post(Loan(9, 1), TAG)
    assert not one.ended
    assert not one.arrived


@pytest.mark.parametrize("is_asleep", [False, True])
def test_a_first_message_wakes_the_thread_that_waits_for_it(*, is_asleep: bool) -> None:
    one = Peer(1)
    bell = one.bells[HEAD] = Awaited()
    bell.turn = turn = threading.Lock() if is_asleep else None
    if turn is not None:
        turn.acquire()
    feed(one, frame(Kind.MESSAGE, HEAD))
    assert bell.is_over
    assert turn is None or not turn.locked()


def test_accepted_messages_are_taken_and_others_wait() -> None:
    one, offered, has_room = Peer(1), [], [True, True, False, True]

    def accept(message: bytes) -> bool:
        offered.append(message)
        return has_room.pop(0)

    one.attendance = attendance = Attendance({HEAD: accept})
    for each in (b"a", b"b", b"c"):
        feed(one, frame(Kind.MESSAGE, HEAD, 1) + each)
    assert offered == [b"a", b"b", b"c"]
    one.give_out(HEAD)
    assert offered == [b"a", b"b", b"c", b"c"]
    assert one.head_of(1, HEAD) == frame(Kind.MESSAGE, HEAD, 1, 3)
    attendance.close()


# ---------------------------------------------------------------- a peer that breaks the protocol

_UNUSED, _WORDS = head_tag(5), payload_tag(0, 2)
_MOST = bytes(UNASKED_MAX_NBYTES)
# The keys are the texts of the errors.
_LIES: dict[str, list[bytes]] = {
    "a frame of kind 0": [frame(0)],
    "a frame of kind 99": [frame(99)],
    "a frame of kind 4294967295": [b"\xff" * HEADER.size],
    f"a message of {len(_MOST) + 1} bytes unasked": [frame(Kind.MESSAGE, HEAD, len(_MOST) + 1)],
    f"a message of {TINY_MAX_NBYTES + 1} bytes": [frame(Kind.MESSAGE, TAG, TINY_MAX_NBYTES + 1)],
    f"a message of {1 << 63} bytes unasked": [frame(Kind.MESSAGE, HEAD, 1 << 63)],
    "9 bytes for 8": [frame(Kind.MESSAGE, TAG, 9) + bytes(9), frame(Kind.OFFER, TAG, 9, 1)],
    f"{1 << 63} bytes for 8": [frame(Kind.OFFER, TAG, 1 << 63, 1)],
    "an offer that is not allowed": [
        frame(Kind.OFFER, HEAD, 9, 1),
        2 * frame(Kind.OFFER, _WORDS, 9, 1),
        frame(Kind.SHARE, TAG, 8, 1),  # without a descriptor
    ],
    "an answer to an offer that was not made": [
        frame(Kind.TAKE, number=9),
        2 * frame(Kind.TAKE, number=1),
        frame(Kind.HELD, number=9),
    ],
    "content that was not requested": [
        frame(Kind.CONTENT, number=1),
        frame(Kind.OFFER, TAG, 8, 5) + 2 * (frame(Kind.CONTENT, number=5) + bytes(8)),
    ],
    "credit for what was not sent": [
        *[frame(Kind.CREDIT, _UNUSED, number=number) for number in (0, 1, 1 << 63)],
        frame(Kind.MESSAGE, _UNUSED, number=1),
    ],
    "a frame of kind 8": [frame(Kind.FAREWELL, nbytes=n) for n in (0, FAREWELL_MAX_NBYTES + 1)],
    "a frame after its farewell": [
        frame(Kind.FAREWELL, nbytes=1) + b"a" + frame(Kind.CREDIT, HEAD, number=1)
    ],
    "more first messages than it may be ahead": [
        frame(Kind.MESSAGE, HEAD) * (AHEAD_MAX + 1),
        2 * (frame(Kind.MESSAGE, HEAD, len(_MOST)) + _MOST),
    ],
    f"messages in more than {WAITING_LANES_MAX} lanes ahead": [
        b"".join(frame(Kind.MESSAGE, head_tag(at)) for at in range(WAITING_LANES_MAX + 1))
    ],
    f"more than {WAITING_MAX} words and offers ahead": [
        b"".join(frame(Kind.MESSAGE, _WORDS + at % 999) for at in range(WAITING_MAX + 1)),
        b"".join(frame(Kind.OFFER, _WORDS, 9, number) for number in range(WAITING_MAX + 1)),
    ],
}


@pytest.mark.parametrize("split", [5, 1 << 30])
@pytest.mark.parametrize(
    ("reason", "at"), [(reason, at) for reason, said in _LIES.items() for at in range(len(said))]
)
def test_a_frame_that_no_link_sends_ends_all(reason: str, at: int, split: int) -> None:
    one = Peer(1)
    into = [Transfer(room(8)), Transfer(room(8))]
    for each in into:
        one.post(each, TAG)
    offered, held = send(one, bytes(99), TAG), [send(one, b"", HEAD) for _ in range(AHEAD_MAX + 1)]
    feed(one, _LIES[reason][at], split)
    assert reason in one.ended
    assert one.ended.startswith("rank 1 has sent ")
    assert one.ended.endswith(_NO_LINK)
    for each in (into[1], offered, held[-1]):
        assert each.is_over
        assert each.reason == one.ended
    assert one.first_out() is None
    with pytest.raises(LinkClosed, match=_NO_LINK):
        one.post(Transfer(room(8)), payload_tag(5, 9))


@pytest.mark.parametrize(
    ("said", "came", "reason"),
    [
        (frame(Kind.SHARE, TAG, 8, 1), [share(is_sealed=False)], "memory that it could truncate"),
        (frame(Kind.SHARE, TAG, 9, 1), [share()], "9 bytes for 0"),
        (frame(Kind.SHARE, HEAD, 8, 1), [share()], "an offer that is not allowed"),
        (frame(Kind.OFFER, TAG, 8, 1), [share()], "a descriptor without a frame"),
        (frame(Kind.MESSAGE, HEAD), [share()], "a descriptor without a frame"),
        (frame(Kind.SHARE, TAG, 8, 1), 2 * [share()], "a descriptor without a frame"),
        (frame(Kind.SHARE, payload_tag(0, 2), 9, 1), [share()], "9 bytes for 99"),
        (frame(Kind.OFFER, TAG, 0, 1), [], "0 bytes for 0"),
        (frame(Kind.MESSAGE, TAG, 8) + bytes(8), [], "8 bytes for 0"),
        (frame(Kind.MESSAGE, TAG), [], "0 bytes for 0"),
        (frame(Kind.SHARE, TAG, 8, 1), [share(LENT_FILES_MAX + 1)], "more files than may wait"),
        (frame(Kind.HELD, number=1), [], "an answer to an offer that was not made"),
    ],
)
def test_an_invalid_share_ends_all(said: bytes, came: list[Any], reason: str) -> None:
    one = Peer(1)
    one.lend(Lent(None, members(9)), TAG)  # number 1, which is only a copy
    one.post(Loan(8, 1), TAG)
    one.post(Transfer(room(99)), payload_tag(0, 2))
    one.descriptors.extend(came)
    feed(one, said)
    assert reason in one.ended
    assert not one.descriptors


def test_a_message_that_may_not_be_ahead_gets_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated = mock.Mock(wraps=allocate)
    monkeypatch.setattr(peer, "allocate", allocated)
    one = Peer(1)
    feed(one, frame(Kind.MESSAGE, HEAD, UNASKED_MAX_NBYTES) + bytes(UNASKED_MAX_NBYTES))
    feed(one, frame(Kind.MESSAGE, HEAD, 1 << 20))
    assert "more first messages than it may be ahead" in one.ended
    assert [call.args[1] for call in allocated.call_args_list] == [UNASKED_MAX_NBYTES]


_FRAMES = st.builds(
    frame,
    st.one_of(st.integers(0, 9), st.integers(0, (1 << 32) - 1)),
    st.one_of(st.sampled_from(_TAGS), st.integers(0, (1 << 32) - 1)),
    st.one_of(st.integers(0, 70), st.integers(0, (1 << 64) - 1)),
    st.one_of(st.integers(0, 4), st.integers(0, (1 << 64) - 1)),
)


@given(
    st.lists(st.one_of(_FRAMES, st.binary(max_size=90)), max_size=30),
    st.integers(1, 99),
    st.booleans(),
)
def test_nothing_that_arrives_breaks_a_peer_or_fills_its_memory(
    frames: list[bytes],
    split: int,
    has_files: bool,  # noqa: FBT001  # hypothesis passes it by position
) -> None:
    one = Peer(1)
    into = [(Transfer(room(64)), each) for each in _TAGS for _ in range(2)]
    for transfer, tag in into:
        one.post(transfer, tag)
    pending = [send(one, bytes(9), HEAD), send(one, bytes(99), TAG)]
    one.lend(Lent(share(), members(9)), TAG)
    if has_files:
        one.descriptors.append(share())
    said = b"".join(frames)
    feed(one, said, split)
    kept = sum(len(each) for of in one.arrived.values() for each in of if isinstance(each, bytes))
    assert kept <= len(said)
    assert one.ended or one.room()
    if one.ended:
        assert all(each.is_over for each, _ in into)
        assert pending[1].is_over


@given(
    st.lists(
        st.tuples(st.sampled_from(_TAGS), st.binary(max_size=TINY_MAX_NBYTES)), max_size=AHEAD_MAX
    ),
    st.lists(st.integers(1, 60), min_size=1),
)
def test_the_split_of_the_bytes_makes_no_difference(
    messages: list[tuple[int, bytes]], splits: list[int]
) -> None:
    one = Peer(1)
    said = b"".join(frame(Kind.MESSAGE, tag, len(each)) + each for tag, each in messages)
    split = itertools.cycle(splits)
    while said:
        count = next(split)
        feed(one, said[:count])
        said = said[count:]
    assert not one.ended
    for tag in _TAGS:
        wanted = [each for its, each in messages if its == tag]
        assert list(one.arrived.get(tag, ())) == wanted


@pytest.mark.parametrize("split", [1, 30, 1 << 30])
def test_a_farewell_and_the_messages_before_it_are_kept(split: int) -> None:
    one, farewell = Peer(1), bytes(range(100))
    said = frame(Kind.MESSAGE, HEAD, 1) + b"a" + frame(Kind.FAREWELL, 0, 100) + farewell
    feed(one, said[:-1], split)
    assert not one.farewell
    feed(one, said[-1:])
    assert one.farewell == farewell
    assert one.take(HEAD) == b"a"


def test_an_end_ends_all_waits() -> None:
    one = Peer(1)
    into = [Transfer(room(99)) for _ in range(3)]
    for at, transfer in enumerate(into):
        one.post(transfer, payload_tag(0, at))
    for number in range(2):  # both were requested, and one has begun to arrive
        feed(one, frame(Kind.OFFER, payload_tag(0, number), 99, number))
    one.descriptors.append(share())
    feed(one, frame(Kind.SHARE, payload_tag(0, 7), 9, 5))
    feed(one, frame(Kind.CONTENT, number=1) + b"a")
    queued = send(one, b"", HEAD)
    lent = Lent(share(), members(9))
    one.lend(lent, TAG)
    bell = one.bells[HEAD] = Awaited()
    one.attendance = attendance = Attendance({HEAD: lambda _: False})
    one.end("it has ended")
    for each in (*into, queued, lent, bell):
        assert each.reason == "it has ended"
        assert each.is_over
    assert os.eventfd_read(attendance.prompts)
    attendance.close()
    late = Loan(9, 1)
    one.post(late, payload_tag(0, 7))
    assert late.share is None  # what was lent is released
    assert one.filling is None


def test_after_an_end_only_what_had_arrived_can_be_taken() -> None:
    one = Peer(1)
    feed(one, frame(Kind.MESSAGE, HEAD, 1) + b"a" + frame(Kind.MESSAGE, TAG, 1) + b"b")
    feed(one, frame(Kind.OFFER, payload_tag(0, 2), 99, 1))
    going = send(one, filled(99).numpy().tobytes(), TAG)
    one.end("it has ended")
    one.end("another reason")
    assert one.ended == going.reason == "it has ended"
    assert one.take(HEAD) == b"a"
    into, late = Transfer(room(1)), Transfer(room(99))
    one.post(into, TAG)
    assert into.is_over
    assert bytes(into.view) == b"b"
    one.post(late, payload_tag(0, 2))  # only its offer has arrived
    assert late.reason == "it has ended"
    assert one.take(HEAD) is None
    with pytest.raises(LinkClosed, match="it has ended"):
        one.post(Transfer(room(1)), TAG)
    with pytest.raises(LinkClosed, match="it has ended"):
        one.lend(Lent(None, members(9)), TAG)
