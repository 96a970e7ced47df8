"""Contracts of the interfaces, as functions that take a factory of an implementation."""

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from enum import Enum
from typing import Any
from unittest import mock

import pytest
import torch

import objcomm
from objcomm import DecodeError, EncodeError
from objcomm._codecs import decode, encode
from objcomm._codecs.base import Codec
from objcomm._transport.link import (
    Awaitable,
    Connections,
    Link,
    LinkClosed,
    LinkError,
    LinkTimeout,
    Pending,
    head_tag,
    payload_tag,
    receipt_tag,
)
from objcomm._wire.header import WINDOW_NBYTES
from tests.same import assert_same
from tests.waits import PATIENCE_S, wait_until


def check_codec(make: Callable[[], Codec], values: Callable[[], list[Any]], refused: Any) -> None:
    """Check a codec against `objcomm._codecs.base.Codec`.

    Args:
        make: returns the codec.
        values: returns objects that the codec can encode, new ones on each call.
        refused: an object that the codec refuses.
    """
    codec = make()
    assert isinstance(codec, Codec)
    assert codec.name.isascii()
    assert 0 < len(codec.name) <= 16
    for value, same in zip(values(), values(), strict=True):
        assert_same(_carried(codec, value), same, sharing=False)
        assert_same(value, same)  # encoding changes nothing
    _check_splitting(codec, values())
    _check_damage(codec, values())
    _check_threads(codec, values)
    with pytest.raises(EncodeError) as caught:
        encode(codec, refused)
    assert caught.value.codec == codec.name
    assert caught.value.path.startswith("obj")
    assert_same(_carried(codec, values()[0]), values()[0], sharing=False)


def _carried(codec: Codec, value: Any) -> Any:
    """Return what a receiver decodes, with separate memory for each buffer."""
    return objcomm.from_tensor(objcomm.to_tensor(value, codec=codec.name))


def _check_splitting(codec: Codec, values: list[Any]) -> None:
    for value in values:
        encoded = codec.encode(value)
        assert isinstance(encoded.meta, (bytes, bytearray))
        for buffer in encoded.buffers:
            assert buffer.flat.dtype is torch.uint8
            assert buffer.flat.dim() == 1
            assert buffer.flat.device.type == "cpu"


def _check_damage(codec: Codec, values: list[Any]) -> None:
    """Check that truncated bytes raise a DecodeError or decode to some value, and nothing else."""
    for value in values:
        meta = bytes(codec.encode(value).meta)
        for length in range(0, len(meta), 1 + len(meta) // 50):
            try:
                decode(codec.name, memoryview(meta[:length]), [])
            except DecodeError as error:
                assert error.codec == codec.name  # noqa: PT017  # decoding may also succeed


def _check_threads(codec: Codec, values: Callable[[], list[Any]]) -> None:
    def carry_all(_: int) -> None:
        for value, same in zip(values(), values(), strict=True):
            assert_same(_carried(codec, value), same, sharing=False)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(carry_all, range(8)))


# Longer than a test may take: a wait that ends only by the limit fails the test.
_LIMIT = timedelta(seconds=100)

# Sizes at which links may change how they carry a message: nothing, one byte, the last byte
# separate, a page, a first message, system buffers, pieces of reductions and payloads.
_BOUNDARIES = (0, 1, 2, 4096, WINDOW_NBYTES, 1 << 16, 1 << 18, 1 << 20, 1 << 22)

_LARGE_NBYTES = 20_000_000  # more than any system buffer
_HUGE_NBYTES = 256 << 20  # takes long enough for a process to be killed meanwhile
_MOMENT_SECONDS = 0.1


class Death(Enum):
    """The step at which a peer's process is killed."""

    UNUSED = "before its connection is used"
    NOT_TAKING = "while a send waits that it has not asked for"
    NOT_SENDING = "while a receive waits of which it has sent nothing"
    DONE = "after its last message"
    TAKING = "in the middle of a large transfer to it"
    SENDING = "in the middle of a large transfer from it"


def check_link(
    make: Callable[[tuple[int, ...]], Connections],
    rank: int,
    size: int,
    death: Death | None = None,
) -> None:
    """Check a link against `objcomm._transport.link.Connections`; every rank calls this.

    Args:
        make: creates this rank's link to the other ranks of a tuple, all of which call it.
        rank: this one.
        size: number of ranks, at least two.
        death: if given, check only what follows when the process of rank 1 is killed at this step:
            rank 0 notices, and the connections of the others stay open. A link must pass without
            it, and with each value; links within one process have no such deaths.
    """
    everybody = tuple(range(size))
    others = [peer for peer in everybody if peer != rank]
    link = make(everybody)
    _check_facts(link, rank, size)
    if death is None:
        _check_order(link, others)
        _check_tags(link, others)
        _check_sizes(link, others)
        _check_early_messages(link, others)
        _check_lanes(link, others)
        _check_taking(link, make(everybody), others)
        _check_attending(link, make(everybody), others)
        _check_limits(link, make(everybody), others)
        _check_abort(link, make(everybody), others)
    else:
        pids = _pids(link, others)
        if rank == 1:
            _die(make((0, 1)), death)
        elif rank == 0:
            _survive(make((0, 1)), 1, death, pids[1])
        others.remove(1)
        wait_until(lambda: link.is_closed(1), "its end on a connection that was used before")
        assert list(link.closed()) == [1]
        _meet(link, others)  # these connections stay open
        assert list(link.closed_by()).count(1) == 1
    link.abort()


def is_over(link: Link, pending: Pending) -> bool:
    """Return whether a transfer nobody has waited for succeeded; counts as its one wait."""
    link.move()
    try:
        link.wait(pending, timedelta(milliseconds=1))
    except LinkError:
        return False
    return True


def _check_facts(link: Connections, rank: int, size: int) -> None:
    others = [peer for peer in range(size) if peer != rank]
    assert (link.rank, link.size, len(link.hosts)) == (rank, size, size)
    assert link.kind
    assert link.ahead >= 1
    assert list(link.beside(range(size))) == others
    for peer in others:
        near = [each for each in others if link.hosts[each] == link.hosts[peer]]
        assert list(link.beside([peer])) == near
    assert list(link.closed()) == []
    assert not any(link.is_closed(peer) for peer in others)
    _meet(link, others)


def _check_order(link: Link, others: list[int]) -> None:
    """Messages of a peer with one tag arrive in order; a receive may be longer than a message."""
    lengths, tag = (100, 1, WINDOW_NBYTES, 2), head_tag(0)
    sent = [
        link.send(_filled(link.rank, length), peer, tag) for length in lengths for peer in others
    ]
    for peer in others[::-1]:
        rooms = [torch.zeros(WINDOW_NBYTES, dtype=torch.uint8) for _ in lengths]
        for pending in [link.recv(room, peer, tag) for room in rooms]:
            link.wait(pending, _LIMIT)
        for length, room in zip(lengths, rooms, strict=True):
            assert (room[:length] == peer + 1).all()
            assert not room[length:].any()
    _wait_for_all(link, sent)


def _check_tags(link: Link, others: list[int]) -> None:
    """A message does not wait for an earlier one with another tag."""
    early, late = payload_tag(0, 6), receipt_tag(0, 6)
    for peer in others:
        rooms = torch.zeros(2, 1, dtype=torch.uint8)
        pending = [link.recv(rooms[0], peer, early), link.recv(rooms[1], peer, late)]
        sent = [link.send(_filled(link.rank, 1), peer, late)]
        link.wait(pending[1], _LIMIT)
        assert rooms.tolist() == [[0], [peer + 1]]
        _meet(link, [peer])  # its first message arrives even later
        sent.append(link.send(_filled(link.rank, 1), peer, early))
        link.wait(pending[0], _LIMIT)
        assert rooms.tolist() == [[peer + 1], [peer + 1]]
        _wait_for_all(link, sent)


def _check_sizes(link: Link, others: list[int]) -> None:
    """Any number of bytes arrives unchanged, also in a larger buffer."""
    lengths = sorted({each + more for each in _BOUNDARIES for more in (-1, 0, 1)} - {-1})
    for length in lengths:
        for spare in (0, 3):
            rooms = [torch.full((length + spare,), 255, dtype=torch.uint8) for _ in others]
            posted = [
                link.recv(room, peer, payload_tag(0, 1))
                for peer, room in zip(others, rooms, strict=True)
            ]
            mine = _counting(link.rank, length)
            sent = [link.send(mine, peer, payload_tag(0, 1)) for peer in others]
            _wait_for_all(link, posted)
            for peer, room in zip(others, rooms, strict=True):
                assert torch.equal(room[:length], _counting(peer, length)), length
                assert (room[length:] == 255).all(), length
            _wait_for_all(link, sent)


def _check_early_messages(link: Link, others: list[int]) -> None:
    """A message of any size waits until it is received, and delays no other."""
    tag, lengths = payload_tag(0, 2), (1, WINDOW_NBYTES, _LARGE_NBYTES, 1)
    flats = [_counting(link.rank + number, length) for number, length in enumerate(lengths)]
    sent = [link.send(flat, peer, tag) for peer in others for flat in flats]
    _meet(link, others)  # all have started sending, and may send more
    time.sleep(_MOMENT_SECONDS)
    for number, length in enumerate(lengths):
        for peer in others:
            room = torch.zeros(length, dtype=torch.uint8)
            link.wait(link.recv(room, peer, tag), _LIMIT)
            assert torch.equal(room, _counting(peer + number, length))
    _wait_for_all(link, sent)


def _check_lanes(link: Link, others: list[int]) -> None:
    """Two threads that talk on two lanes at the same time do not interfere."""

    def talk(lane: int) -> None:
        for turn in range(30):
            head = _counting(link.rank + lane, 50 + lane)
            rest = _counting(link.rank + turn + lane, 1 + 9973 * turn)
            sent = [link.send(head, peer, head_tag(lane)) for peer in others]
            sent += [link.send(rest, peer, payload_tag(lane, turn)) for peer in others]
            for peer in others:
                window = torch.zeros(WINDOW_NBYTES, dtype=torch.uint8)
                room = torch.zeros_like(rest)
                posted = link.recv(room, peer, payload_tag(lane, turn))
                link.wait(link.recv(window, peer, head_tag(lane)), _LIMIT)
                assert torch.equal(window[: 50 + lane], _counting(peer + lane, 50 + lane))
                assert not window[50 + lane :].any()
                link.wait(posted, _LIMIT)
                assert torch.equal(room, _counting(peer + turn + lane, 1 + 9973 * turn))
            _wait_for_all(link, sent)

    with ThreadPoolExecutor(2) as threads:
        for each in [threads.submit(talk, lane) for lane in (1, 2)]:
            each.result()


def _check_taking(link: Link, ending: Connections, others: list[int]) -> None:
    """First messages are taken in order; a late one may be taken later, and after the end.

    Args:
        link: stays open.
        ending: rank 0 closes it.
        others: the other ranks.
    """
    tag = head_tag(5)
    ending.expect(others, tag)
    if ending.rank == 0:
        for peer in others if ending.is_interruptible else ():  # a timeout may close other links
            with pytest.raises(LinkTimeout):
                ending.take(peer, head_tag(6), time.monotonic() + _MOMENT_SECONDS)
        sent = [ending.send(bytes([each]) * 100, peer, tag) for peer in others for each in range(3)]
        firsts = [ending.take(peer, tag, math.inf)[0] for peer in others]
        assert firsts == [peer + 1 for peer in others]
        _meet(link, others)  # the others may have taken one message, but not all
        ending.abort()
        del sent
    else:
        assert ending.take(0, tag, math.inf)[:100] == bytes(100)
        _wait_for_all(ending, [ending.send(bytes([ending.rank + 1]), 0, tag)])
        _meet(link, others)
        if not ending.is_interruptible:
            ending.abort()  # Gloo keeps unrequested messages at their sender
            return
        assert ending.take(0, tag, math.inf)[:100] == bytes([1]) * 100
        wait_until(lambda: ending.is_closed(0), "the end")
        assert ending.has_come(0, tag)
        assert ending.came_late(0, tag)
        assert ending.take(0, tag, math.inf)[:100] == bytes([2]) * 100
        for _ in range(2):
            with pytest.raises(LinkClosed):
                ending.take(0, tag, math.inf)
        assert not ending.has_come(0, tag)
        ending.abort()


def _check_attending(link: Link, ending: Connections, others: list[int]) -> None:
    """An attending thread gets all messages in order until the end, whether or not others wait.

    A message without room does not delay one with another tag. An error in the accept callback ends
    the thread.

    Args:
        link: stays open.
        ending: all ranks but rank 0 close it.
        others: the other ranks.
    """
    count = 10  # more than a sender may be ahead
    if ending.rank:
        for number in range(4 * count):
            if number % count == 0:
                _meet(link, others)
            ending.wait(ending.send(bytes([number]), 0, _Attending.tag), _LIMIT)
            if number == 2 * count:
                ending.wait(ending.send(b"w", 0, _Attending.beside), _LIMIT)
        _meet(link, others)
        if ending.rank == 2:
            with contextlib.suppress(LinkClosed):  # rank 0 may close the link while it takes this
                ending.wait(ending.send(b"!", 0, _Attending.beside), _LIMIT)
        ending.abort()
        return
    attending = [_Attending(ending, peer) for peer in others]

    def have_all_come(each: int) -> bool:
        return all(one.came == list(range(each * count)) for one in attending)

    _meet(link, others)
    wait_until(lambda: have_all_come(1), "messages for which nobody waits")
    awaited = [each.has(2 * count - 1) for each in attending]
    _meet(link, others)
    assert all(each.wait() for each in awaited)
    assert have_all_come(2)
    for each in attending:
        each.set(has_room=False)
    _meet(link, others)
    wait_until(lambda: all(each.words == b"w" for each in attending), "a message beside those")
    assert not ending.signal().wait(_MOMENT_SECONDS)
    assert have_all_come(2)
    for each in attending:
        each.set(has_room=True)
    wait_until(lambda: have_all_come(3), "messages for which there is room again")
    lasts = [each.has(4 * count - 1) for each in attending]
    _meet(link, others)
    assert all(last.wait() for last in lasts)
    assert have_all_come(4)
    _meet(link, others)
    for peer, each in zip(others, attending, strict=True):
        each.join(PATIENCE_S)
        assert isinstance(each.error, ZeroDivisionError if peer == 2 else LinkClosed)
    ending.abort()


def _check_limits(link: Link, late: Connections, others: list[int]) -> None:
    """A wait ends when its limit has passed; what was received by then is kept.

    Args:
        link: stays open.
        late: rank 0's wait on it times out, and rank 0 may be unable to use it afterwards.
        others: the other ranks.
    """
    tag, never = payload_tag(0, 3), payload_tag(0, 4)
    if late.rank == 0:
        rooms = {peer: torch.zeros(3, dtype=torch.uint8) for peer in others}
        came = []
        for peer, room in rooms.items():
            first, second, third = [late.recv(each, peer, tag) for each in room.split(1)]
            late.wait(third, _LIMIT)  # so the others have arrived
            late.wait(second, timedelta(milliseconds=1))
            came.append(first)
        missing = [late.recv(_filled(0, 1), peer, never) for peer in others for _ in range(2)]
        began = time.monotonic()
        with pytest.raises(LinkTimeout) as caught:
            late.wait(missing[0], timedelta(seconds=_MOMENT_SECONDS))
        assert caught.value.reason
        assert 0.9 * _MOMENT_SECONDS <= time.monotonic() - began < _LIMIT.total_seconds() / 2
        assert all(is_over(late, each) for each in came)
        assert not any(is_over(late, each) for each in missing[1:])
        assert all((room == peer + 1).all() for peer, room in rooms.items())
    else:
        _wait_for_all(late, [late.send(_filled(late.rank, 1), 0, tag) for _ in range(3)])
    _meet(link, others)
    late.abort()


def _check_abort(link: Link, ending: Connections, others: list[int]) -> None:
    """Rank 0 closes its connections from another thread, and every wait at either end raises.

    Args:
        link: stays open.
        ending: rank 0 aborts it.
        others: the other ranks.
    """
    awaited = others if ending.rank == 0 else [0]
    came, waited = zip(
        *[[ending.recv(_filled(0, 1), peer, head_tag(0)) for _ in range(2)] for peer in awaited],
        strict=True,
    )
    # No rank waits for the first transfer of each pair until after the abort.
    taken, sent = zip(
        *[[ending.send(_filled(0, 1), peer, head_tag(0)) for _ in range(2)] for peer in awaited],
        strict=True,
    )
    _wait_for_all(ending, [*waited, *sent])
    pending = [ending.recv(_filled(0, 1), peer, payload_tag(0, 8)) for peer in awaited]
    unasked = [ending.send(_filled(0, _LARGE_NBYTES), peer, payload_tag(0, 9)) for peer in awaited]
    _meet(link, others)
    aborting = threading.Timer(_MOMENT_SECONDS, ending.abort)
    if ending.rank == 0:
        aborting.start()
    with ThreadPoolExecutor(1) as threads:
        apart = threads.submit(_end_sends, ending, unasked)
        for each in pending:
            with pytest.raises(LinkClosed) as caught:
                ending.wait(each, _LIMIT)
            assert caught.value.reason
        if ending.rank == 0:
            aborting.join()
        else:
            _meet(ending, [peer for peer in others if peer != 0])  # these connections stay open
            ending.abort()
        apart.result()
    assert all(is_over(ending, each) for each in came)
    _check_closed(ending, awaited)
    assert (0 in ending.closed_by()) is (ending.rank != 0)
    with mock.patch("objcomm._transport.threads._LAST_TURN_SECONDS", PATIENCE_S):
        ending.wait_apart(lambda: _wait_for_all(ending, taken))
    ending.abort()
    _meet(link, others)  # unaffected by all this


def _check_closed(link: Connections, peers: Sequence[int]) -> None:
    """The connections to these peers are closed, and each use of them raises."""
    assert set(peers) <= set(link.closed())
    for peer in peers:
        assert link.is_closed(peer)
        assert not link.has_unread(peer)
        with pytest.raises(LinkClosed):
            link.send(_filled(0, 1), peer, payload_tag(0, 10))
        with pytest.raises(LinkClosed):
            link.recv(_filled(0, 1), peer, payload_tag(0, 10))


def _end_sends(link: Link, sent: Sequence[Pending]) -> None:
    """Wait for sends that nobody receives until the link aborts; buffered sends are complete."""
    with contextlib.suppress(LinkClosed):
        link.wait_apart(lambda: _wait_for_all(link, sent))


def _die(link: Connections, step: Death) -> None:
    """Get killed at the step that rank 0 chooses; never returns."""
    tag = payload_tag(0, 11)
    if step is Death.NOT_SENDING:
        link.wait(link.recv(_filled(0, 1), 0, tag), _LIMIT)
    elif step is Death.TAKING:
        while True:
            room, waiting = _begun_to_come(link, 0, tag)
            if _is_half_way(room):
                os.kill(os.getpid(), signal.SIGKILL)
            waiting.join()
    elif step is Death.SENDING:
        _send_without_end(link, 0, tag)
    elif step is Death.DONE:
        link.wait(link.send(_filled(link.rank, 1), 0, tag), _LIMIT)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(_LIMIT.total_seconds())
    raise AssertionError(f"not killed {step.value}")


def _survive(link: Connections, victim: int, step: Death, pid: int) -> None:
    """Notice a peer's death, whatever the peer was doing and this rank waits for."""
    tag = payload_tag(0, 11)
    later = threading.Timer(_MOMENT_SECONDS, os.kill, (pid, signal.SIGKILL))
    if step is Death.UNUSED:
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(LinkClosed):
            link.wait(link.recv(_filled(0, 1), victim, tag), _LIMIT)
    elif step is Death.NOT_TAKING:
        sent = [link.send(_filled(0, nbytes), victim, tag) for nbytes in (1, _LARGE_NBYTES)]
        later.start()
        with _aborted_when_closed(link, victim):
            _end_sends(link, sent)
    elif step is Death.NOT_SENDING:
        rooms = [_filled(0, nbytes) for nbytes in (1, _LARGE_NBYTES)]
        pending = [link.recv(room, victim, tag) for room in rooms]
        later.start()
        for each in pending:
            with pytest.raises(LinkClosed):
                link.wait(each, _LIMIT)
    elif step is Death.TAKING:
        with _aborted_when_closed(link, victim), pytest.raises(LinkClosed):
            _send_without_end(link, victim, tag)
    elif step is Death.SENDING:
        room, waiting = _begun_to_come(link, victim, tag)
        os.kill(pid, signal.SIGSTOP)
        while not _is_half_way(room):
            os.kill(pid, signal.SIGCONT)
            waiting.join()
            room, waiting = _begun_to_come(link, victim, tag)
            os.kill(pid, signal.SIGSTOP)
        os.kill(pid, signal.SIGKILL)
        waiting.join()
        assert isinstance(waiting.error, LinkClosed)
        assert not room[-1]
    elif step is Death.DONE:
        room = _filled(0, 1)
        taken = link.recv(room, victim, tag)
        wait_until(lambda: link.is_closed(victim), "the end of the connection")
        link.wait(taken, _LIMIT)
        assert room == victim + 1
    wait_until(lambda: link.is_closed(victim), "the end of the connection")
    _check_closed(link, [victim])
    assert list(link.closed_by()) == [victim]
    link.abort()


class _Attending(threading.Thread):
    """Attend to all first messages of one peer.

    Attributes:
        came: the first byte of each message with one tag.
        words: the same for another tag.
        error: how it ended, once it has.
    """

    tag, beside = head_tag(7), head_tag(8)

    def __init__(self, link: Connections, peer: int) -> None:
        super().__init__(daemon=True)
        self._link = link
        self._peer = peer
        self._has_room = True
        self.came: list[int] = []
        self.words = b""
        self._signals: dict[int, Awaitable] = {}
        self.error: BaseException | None = None
        self.start()

    def set(self, *, has_room: bool) -> None:
        """Set whether the accept callback has room from now on."""
        self._has_room = has_room
        self._link.prompt(self._peer)

    def has(self, number: int) -> Awaitable:
        """Return a signal of the link that is set once this message has arrived."""
        awaited = self._signals[number] = self._link.signal()
        return awaited

    def _accept(self, message: bytes) -> bool:
        if self._has_room:
            self.came.append(message[0])
            if message[0] in self._signals:
                self._signals[message[0]].set()
        return self._has_room

    def _accept_beside(self, message: bytes) -> bool:
        self.words += message[:1]
        return not self.words.endswith(b"!") or bool(1 // 0)

    def run(self) -> None:
        accepts = {self.tag: self._accept, self.beside: self._accept_beside}
        try:
            self._link.attend(self._peer, accepts)
        except (LinkClosed, ZeroDivisionError) as error:
            self.error = error


class _Waiting(threading.Thread):
    """Wait for the last of some transfers, and keep all of them alive meanwhile.

    Attributes:
        error: how the wait ended, once it has.
    """

    def __init__(self, link: Link, pending: Sequence[Pending]) -> None:
        super().__init__(daemon=True)
        self._link = link
        self._pending = pending
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._link.wait(self._pending[-1], _LIMIT)
        except LinkClosed as error:
            self.error = error


def _begun_to_come(link: Link, peer: int, tag: int) -> tuple[torch.Tensor, _Waiting]:
    """Return the buffer of a long transfer that is arriving, and the thread that waits for it."""
    room = torch.zeros(_HUGE_NBYTES, dtype=torch.uint8)
    posted = [link.recv(piece, peer, tag) for piece in _cut(link, room)]
    waiting = _Waiting(link, posted)
    waiting.start()
    while not room[0]:
        pass
    return room, waiting


def _is_half_way(room: torch.Tensor) -> bool:
    """Return whether more is to come than any buffer holds; a busy machine may skip this state."""
    return not room[-_LARGE_NBYTES]


@contextlib.contextmanager
def _aborted_when_closed(link: Connections, peer: int) -> Iterator[None]:
    """Abort as a mesh does on a loss, because a thread that waits for a send may not notice it."""

    def abort() -> None:
        wait_until(lambda: link.is_closed(peer), "the end of the connection")
        link.abort()

    with ThreadPoolExecutor(1) as threads:
        aborting = threads.submit(abort)
        yield
        aborting.result()


def _sent(link: Link, peer: int, tag: int) -> list[Pending]:
    """Start a long transfer, in the pieces that its receiver expects."""
    flat = _filled(link.rank, _HUGE_NBYTES)
    return [link.send(piece, peer, tag) for piece in _cut(link, flat)]


def _send_without_end(link: Link, peer: int, tag: int) -> None:
    """Send again and again, because the process may not have died during the first transfer."""
    while True:
        link.wait_apart(lambda: _wait_for_all(link, _sent(link, peer, tag)))


def _cut(link: Link, flat: torch.Tensor) -> list[torch.Tensor]:
    return [flat[:-1], flat[-1:]] if link.needs_last_byte_apart else [flat]


def _pids(link: Link, others: list[int]) -> dict[int, int]:
    """Return the process ids of the other ranks."""
    tag, mine = payload_tag(0, 12), torch.tensor([os.getpid()])
    sent = [link.send(mine.view(torch.uint8), peer, tag) for peer in others]
    pids = {peer: torch.zeros_like(mine) for peer in others}
    for peer, pid in pids.items():
        link.wait(link.recv(pid.view(torch.uint8), peer, tag), _LIMIT)
    _wait_for_all(link, sent)
    return {peer: int(pid) for peer, pid in pids.items()}


def _meet(link: Link, others: Sequence[int]) -> None:
    """Return once all others have called this."""
    tag = payload_tag(0, 9)
    pending = [link.recv(_filled(0, 1), peer, tag) for peer in others]
    pending += [link.send(_filled(0, 1), peer, tag) for peer in others]
    _wait_for_all(link, pending)


def _wait_for_all(link: Link, pending: Sequence[Pending]) -> None:
    for each in pending:
        link.wait(each, _LIMIT)


def _filled(rank: int, length: int) -> torch.Tensor:
    return torch.full((length,), rank + 1, dtype=torch.uint8)


def _counting(start: int, length: int) -> torch.Tensor:
    """Return bytes that differ from their neighbors, and from those of another start."""
    return (torch.arange(length, dtype=torch.int32) * 7 + start * 31).to(torch.uint8)
