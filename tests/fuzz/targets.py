"""Functions that accept any bytes: they return, or raise an ``ObjcommError``.

No target unpickles without a list of allowed functions: a mutated pickle may run anything.
"""

import collections
import datetime
import functools
from collections.abc import Callable
from typing import Any

import torch

import objcomm
from objcomm._algorithms import routes
from objcomm._codecs.base import decode
from objcomm._collectives.reduction import structures
from objcomm._collectives.reduction.leafwise import Destination, operand, received
from objcomm._collectives.reduction.operators import operator_for
from objcomm._collectives.reduction.structures import room_for, tensors_of
from objcomm._collectives.split import _by_color, contribution_of
from objcomm._config import Settings
from objcomm._p2p.mailbox import Arrived, Mailbox, RecvRequest
from objcomm._wire.admission import Gate
from objcomm._wire.failure_message import DifferenceError, failures_in
from objcomm._wire.header import HEADER_NBYTES, Header, Operation, Status, check_same_call
from objcomm._wire.message import Message, compose, open_body
from objcomm.errors import CollectiveError, text_of
from tests import samples
from tests.unit.memory_link import MemoryLink, Wires, exchange_on, header_of, new_lane

#: The most that one message may make a receiver allocate, in bytes.
LIMIT_NBYTES = 1 << 20

#: As many ranks as the bundles in the seeds have heads, and what each head carries.
BUNDLE_SIZE = 3
HEADS_META = b"\x93\1\2\3"

#: The metadata of a message from rank 1 to rank 0.
PAIR: dict[str, Any] = {"operation": Operation.SEND, "root": 0}

#: This rank's operand of a reduction.
OPERAND = {"loss": 0.5, "grads": [torch.zeros(16), (1, torch.ones(2, 4, dtype=torch.int64))]}

samples.names()  # registers the classes that the plain codec may rebuild


def header(raw: bytes) -> None:
    """Parse the fixed part, and compare it with this rank's own."""
    theirs = Header.unpack(raw)
    str(theirs.position)
    check_same_call(header_of(0), theirs, 1)


def message(raw: bytes) -> Message:
    """Receive a whole message as an exchange does, except the content of large buffers."""
    gate = Gate(Settings(max_nbytes=LIMIT_NBYTES), "fuzz", 0)
    opened = gate.take_in(raw, gate.header_in(raw))
    arrived = raw[HEADER_NBYTES : HEADER_NBYTES + len(opened.body)]
    if not opened.header.is_inline:
        memoryview(opened.body)[: len(arrived)] = arrived
    if not opened.is_open:
        open_body(opened)
    nbytes = sum(buffer.flat.numel() for buffer in opened.buffers)
    assert nbytes <= LIMIT_NBYTES, f"{nbytes} bytes were allocated"
    return opened


def tensor(raw: bytes) -> None:
    """Call ``from_tensor`` as a rank that decodes plain data only."""
    with objcomm.configure(accept=["msgpack"]):
        objcomm.from_tensor(torch.frombuffer(bytearray(raw or b"\0"), dtype=torch.uint8))


def plain(raw: bytes) -> None:
    """Decode the plain codec's bytes, with buffers of each kind."""
    decode("msgpack", memoryview(raw), _buffers())


def restricted_pickle(raw: bytes) -> None:
    """Decode the pickle codec's bytes, with only its own names and a few classes allowed."""
    with objcomm.configure(allow=[collections.deque, datetime.date, samples.Run, samples.Colour]):
        decode("pickle", memoryview(raw), _buffers())


def failure(raw: bytes) -> None:
    """Read a failure report, and build the error from it."""
    failures = failures_in([message(raw)])
    if failures:
        str(CollectiveError("gather", failures))
        min(failures).bit_length()


def bundle(raw: bytes) -> None:
    """Read the heads of several ranks in one message."""
    link = MemoryLink(Wires(BUNDLE_SIZE), 0)
    exchange = exchange_on(link, new_lane())
    mine = compose(exchange.header, HEADS_META)
    for opened in routes.open_bundle(exchange, message(raw), range(BUNDLE_SIZE), mine):
        if opened.header.status == Status.FAILURE and opened is not mine:
            failures_in([opened])


def envelope(raw: bytes) -> None:
    """Read the first part of a point-to-point message, as the listening thread does."""
    gate = Gate(Settings(max_nbytes=LIMIT_NBYTES), "fuzz", 0)
    theirs = gate.header_in(raw)
    gate.check_call(header_of(1, **PAIR), theirs, 1)
    gate.check_addressed(theirs)
    held = bytes(memoryview(raw)[: theirs.head_nbytes])
    box = Mailbox(0, BUNDLE_SIZE)
    taken: list[RecvRequest] = []
    request = RecvRequest(1, None, on_end=lambda: taken.append(request))
    box.ask(request)
    box.deliver(Arrived(1, theirs.tag, len(held), theirs, held))
    assert taken == [request]
    exchange = exchange_on(MemoryLink(Wires(2), 0), new_lane())
    exchange.gate = gate
    failures_in([exchange.gate.take_in(held, theirs)])


def answer(raw: bytes) -> None:
    """Read the first rank's answer in a reduction of leaves, and build the result from it."""
    plain = decode("msgpack", memoryview(raw), _tensors())
    structure, _ = structures.describe(OPERAND, operator_for("sum"), 1)
    place = Destination(
        structure,
        1,
        BUNDLE_SIZE,
        is_taker=True,
        may_follow=True,
        linked="",
        most_nbytes=LIMIT_NBYTES,
    )
    found = received(plain, place)
    whole = structure if found.structure is None else found.structure
    leaves = list(structures.walk(whole, OPERAND))
    following, nbytes = dict(found.following), 0
    for at, (_, description, own) in enumerate(leaves):
        about = tensors_of(description)
        if own is structures.ABSENT and about is not None and at in following:
            nbytes += room_for(about, "sum", "meta")[1].nbytes
    assert nbytes <= LIMIT_NBYTES, f"{nbytes} bytes were allocated"
    structures.rebuild(whole, OPERAND, [None] * len(leaves))


def operands(raw: bytes) -> None:
    """Compare two ranks' operands in a reduction of leaves, as the comparing rank does."""
    theirs = decode("msgpack", memoryview(raw), _tensors())
    mine, _ = structures.describe(OPERAND, operator_for("sum"), 0)
    structure, leaves, _ = operand(theirs)
    for may_lack in (False, True):
        try:
            _, merged = structures.merge([mine, structure], may_lack=may_lack)
        except DifferenceError as error:
            str(error)
        else:
            assert all(leaves[each.places[1]] is not leaves for each in merged if 1 in each.places)


def word(raw: bytes) -> None:
    """Read what a rank announces when groups are created."""
    sent = contribution_of(decode("msgpack", memoryview(raw), _buffers()))
    _by_color([sent, sent])


#: By the name of their folder in ``corpus/``.
TARGETS: dict[str, Callable[[bytes], object]] = {
    "header": header,
    "message": message,
    "tensor": tensor,
    "plain": plain,
    "restricted_pickle": restricted_pickle,
    "failure": failure,
    "bundle": bundle,
    "envelope": envelope,
    "operands": operands,
    "answer": answer,
    "word": word,
}


def attempt(name: str, raw: bytes) -> bool:
    """Run a target, and return whether the bytes were accepted as valid.

    Any exception other than an ``ObjcommError`` propagates, and is a defect; so is one that reports
    a failed memory allocation.
    """
    try:
        TARGETS[name](raw)
    except objcomm.ObjcommError as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, MemoryError) or "allocate memory" in text_of(cause):
                raise
            cause = cause.__cause__
        return False
    return True


@functools.cache
def _contents() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(64, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8)


def _buffers() -> list[Any]:
    some, none = _contents()
    return [some.clone(), b"bytes", bytearray(b"bytearray"), memoryview(bytearray(8)), none]


def _tensors() -> list[Any]:
    some, _ = _contents()
    return [some.clone() for _ in range(3)]
