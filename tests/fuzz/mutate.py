"""Damaged and hostile variants of objcomm's own messages, most of them with valid checksums."""

import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgpack
import numpy as np
import torch

import objcomm
from objcomm._algorithms import routes
from objcomm._codecs import codec_named
from objcomm._collectives.reduction import structures
from objcomm._collectives.reduction.operators import operator_for
from objcomm._wire.failure_message import failure_message
from objcomm._wire.header import HEADER_NBYTES, ROW_NBYTES, Header, SizeRow, Status, pack_table
from objcomm._wire.message import compose
from objcomm.errors import RankFailure
from tests import samples
from tests.fuzz import drawn
from tests.fuzz.targets import BUNDLE_SIZE, HEADS_META, OPERAND, PAIR
from tests.unit.memory_link import MemoryLink, Wires, exchange_on, first_bytes, header_of, new_lane

_LARGEST_SEED_NBYTES = 8000
_LONGEST_WORD = 1000
Mutation = Callable[[random.Random, bytearray], None]


def _flip(chance: random.Random, raw: bytearray) -> None:
    raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)


def _set(chance: random.Random, raw: bytearray) -> None:
    raw[chance.randrange(len(raw))] = chance.randrange(256)


def _overwrite(chance: random.Random, raw: bytearray) -> None:
    nbytes = chance.choice((1, 2, 4, 8))
    number = chance.choice(drawn.EXTREMES) % (1 << 8 * nbytes)
    at = chance.randrange(len(raw))
    raw[at : at + nbytes] = number.to_bytes(nbytes, chance.choice(("big", "little")))


def _delete(chance: random.Random, raw: bytearray) -> None:
    at = chance.randrange(len(raw))
    del raw[at : at + chance.randrange(1, 9)]


def _repeat(chance: random.Random, raw: bytearray) -> None:
    at = chance.randrange(len(raw))
    raw[at:at] = raw[at : at + chance.randrange(1, 33)] * chance.choice((1, 1, 2, 50))


def _cut(chance: random.Random, raw: bytearray) -> None:
    del raw[chance.randrange(len(raw)) :]


def _insert_word(chance: random.Random, raw: bytearray) -> None:
    at = chance.randrange(len(raw))
    word = chance.choice(_WORDS)
    raw[at : at + chance.choice((0, len(word)))] = word


_MUTATIONS: tuple[Mutation, ...] = (
    *(_flip, _set, _set, _overwrite, _delete, _repeat, _cut),
    *(_insert_word, _insert_word),
)

_WORDS = [
    *(drawn.packed(msgpack.ExtType(1, name.encode())) for name in drawn.PARTS),
    *(drawn.packed(text) for text in drawn.TEXTS if len(text) < _LONGEST_WORD),
    *(drawn.packed(number) for number in drawn.EXTREMES),
    *(b"\x90", b"\x91", b"\x92", b"\x93", b"\x94", b"\x98", b"\xc0", b"\xc2", b"\xc3", b"\xdd"),
]


def damaged(chance: random.Random, raw: bytes) -> bytes:
    """Return the bytes after one to four mutations."""
    changed = bytearray(raw)
    for _ in range(chance.choice((1, 1, 2, 4))):
        if changed:
            chance.choice(_MUTATIONS)(chance, changed)
    return bytes(changed)


def _seed_objects() -> list[Any]:
    found = []
    for name in samples.names("msgpack"):
        obj = samples.make(name)
        if objcomm.to_tensor(obj, codec="msgpack").numel() < _LARGEST_SEED_NBYTES:
            found.append(obj)
    return [*found, {"w": torch.arange(10_000), "b": bytes(70_000)}]


def _messages() -> list[bytes]:
    return [bytes(objcomm.to_tensor(obj, codec="msgpack").numpy()) for obj in _seed_objects()]


def _metas(objs: Sequence[Any], codec: str = "msgpack") -> list[bytes]:
    return [bytes(codec_named(codec).encode(obj).meta) for obj in objs]


def _failures() -> list[bytes]:
    both = [RankFailure(1, "ValueError", "wrong", "Traceback…"), RankFailure(2, "E", "", "\ud800")]
    header = header_of(1)
    return [first_bytes(failure_message(header, each)) for each in (both[:1], both, [])]


def _bundles() -> list[bytes]:
    header = header_of(0)
    heads = [
        compose(header._replace(sender=rank, codec="msgpack"), HEADS_META)
        for rank in range(BUNDLE_SIZE)
    ]
    failed = failure_message(header_of(2), [RankFailure(2, "E", "m", "t")])
    bundles = [heads, [*heads[:2], failed]]
    exchange = exchange_on(MemoryLink(Wires(BUNDLE_SIZE), 0), new_lane())
    return [
        first_bytes(routes.compose_bundle(exchange, [first_bytes(message) for message in each]))
        for each in bundles
    ]


def _over_the_targets_buffer() -> list[Any]:
    """Return objects whose only large member has 64 bytes, which is the targets' first buffer."""
    longs, floats = torch.arange(8), np.arange(16, dtype=np.float32)
    return [
        longs,
        {"w": longs, "tied": [longs, longs.view(2, 4)]},
        torch.arange(16, dtype=torch.float32).view(4, 4).t(),
        torch.zeros(64, dtype=torch.bool),
        torch.arange(32, dtype=torch.bfloat16).view(2, 16).expand(3, 2, 16),
        torch.nn.Parameter(torch.ones(8, dtype=torch.float64)),
        floats,
        (floats.reshape(4, 4, order="F"), {"step": 2**70, "ok": None}, [b"raw", 1.5, "text"]),
        np.zeros(8, [("a", "<f4"), ("b", "<i4")]),
        np.zeros(8, "datetime64[ns]"),
    ]


def _envelopes() -> list[bytes]:
    found = []
    for obj in (None, [1, "two"], torch.arange(16), bytes(70_000)):
        encoded = codec_named("msgpack").encode(obj)
        header = header_of(1, **PAIR, tag=7, codec="msgpack")
        found.append(first_bytes(compose(header, encoded.meta, encoded.buffers, codec="msgpack")))
    return [
        *found,
        first_bytes(failure_message(header_of(1, **PAIR), [RankFailure(1, "E", "", "")])),
    ]


def _operands() -> list[Any]:
    """Return operands: equal, with one more key, in another order, and with separate tensors."""
    operator = operator_for("sum")
    objs: list[Any] = [
        OPERAND,
        {**OPERAND, "more": [1, {"deep": torch.zeros(16)}]},
        dict(reversed(OPERAND.items())),
        {"grads": OPERAND["grads"]},
        1,
    ]
    found = []
    for obj in objs:
        structure, leaves = structures.describe(obj, operator, 1)
        follows = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        found += [(structure, leaves, ""), (structure, follows, "")]
    return found


def _answers() -> list[Any]:
    same, more, *_ = [structure for structure, leaves, _ in _operands() if None not in leaves]
    following = ((1, (0, 1, 2)), (3, (0, 1, 2)))
    lacking = (*following, (5, (0, 2)))
    return [
        (None, (0.5, None, 1, None), (), ""),
        (None, (0.5, 1), following, ""),
        (same, (0.5, 1), following, ""),
        (more, (0.5, 1, 1), lacking, ""),
    ]


_ANNOUNCED: Final[Sequence[Any]] = (
    (1, 0, "f" * 32, []),
    ("host", -3, "0" * 32, ["objcomm/1/2"]),
    (None, 0, "", []),
)


_SEEDS: Final[dict[str, Callable[[], list[bytes]]]] = {
    "header": lambda: [header_of(rank, call_site="é" * rank).pack() for rank in range(3)],
    "message": lambda: [*_messages(), *_bundles()],
    "tensor": _messages,
    "plain": lambda: _metas([*_seed_objects(), *_over_the_targets_buffer()]),
    "restricted_pickle": lambda: _metas(_over_the_targets_buffer(), "pickle"),
    "failure": _failures,
    "bundle": _bundles,
    "envelope": _envelopes,
    "operands": lambda: _metas(_operands()),
    "answer": lambda: _metas(_answers()),
    "word": lambda: _metas(_ANNOUNCED),
}


def seeds(name: str) -> list[bytes]:
    """Return valid messages for a target."""
    return _SEEDS[name]()


# The share of inputs that are newly drawn; the rest are mutations, which are mostly refused early.
_DRAWN_SHARES = {
    **dict.fromkeys(("plain", "restricted_pickle"), 0.5),
    **dict.fromkeys(("operands", "answer", "word"), 0.1),
}


def variant(chance: random.Random, name: str, raw: bytes) -> bytes:
    """Return a mutated input for a target, based on a valid one."""
    if name in _DRAWN_SHARES:
        draw = chance.random()
        share = _DRAWN_SHARES[name]
        if draw < share:
            value = drawn.value(chance)
            raw = drawn.Pickled(chance, value).stream if "pickle" in name else drawn.packed(value)
        return raw if draw < 0.8 * share else damaged(chance, raw)
    if chance.random() < 0.1:
        return damaged(chance, raw)
    return _resealed(chance, raw)


def _resealed(chance: random.Random, raw: bytes) -> bytes:
    """Change a message's fields, table or content, and then all its checksums."""
    header = Header.unpack(raw)
    body_to = HEADER_NBYTES + header.body_nbytes
    body, payload = raw[HEADER_NBYTES:body_to], raw[body_to:]
    draw = chance.random()
    if draw < 0.25:
        header = _with_other_fields(chance, header)
    elif draw < 0.4 and header.buffer_count:
        header, body = _with_other_rows(chance, header, body)
    elif draw < 0.5 and payload:
        payload = damaged(chance, payload[:100]) + payload[100:]
    else:
        table_to = header.buffer_count * ROW_NBYTES
        meta_to = table_to + header.meta_nbytes
        meta = _content(chance, header, body[table_to:meta_to])
        body = body[:table_to] + meta + body[meta_to:]
        header = header._replace(meta_nbytes=len(meta), body_nbytes=len(body))
    tag = zlib.crc32(payload) if header.status == Status.VALUE else header.tag
    return header._replace(body_checksum=zlib.crc32(body), tag=tag).pack() + body + payload


def _content(chance: random.Random, header: Header, meta: bytes) -> bytes:
    if header.status == Status.BUNDLE and chance.random() < 0.7:
        head_nbytes = len(meta) // BUNDLE_SIZE
        at = chance.randrange(BUNDLE_SIZE) * head_nbytes
        head = meta[at : at + head_nbytes]
        try:
            changed = _resealed(chance, head)
        except objcomm.WireError:  # the heads have different lengths
            changed = damaged(chance, head)
        return meta[:at] + changed + meta[at + head_nbytes :]
    if chance.random() < 0.4:
        return drawn.packed(drawn.value(chance))
    return damaged(chance, meta)


_FIELD_BITS: Final[Sequence[tuple[str, int, bool]]] = (
    *((name, 8, False) for name in ("status", "flags", "operation")),
    *((name, 31, True) for name in ("sender", "root")),
    *((name, 32, False) for name in ("lane", "epoch", "buffer_count")),
    *((name, 64, False) for name in ("group", "sequence", "fingerprint")),
    *((name, 64, False) for name in ("meta_nbytes", "body_nbytes", "payload_nbytes")),
)


def _with_other_fields(chance: random.Random, header: Header) -> Header:
    for name, bits, is_signed in chance.sample(_FIELD_BITS, chance.choice((1, 1, 2, 3))):
        before: int = getattr(header, name)
        number = chance.choice((chance.choice(drawn.EXTREMES), before + 1, max(0, before - 1)))
        number %= 1 << bits
        changed: dict[str, Any] = {name: -number if is_signed and number % 2 else number}
        header = header._replace(**changed)
    if chance.random() < 0.2:
        header = header._replace(codec=chance.choice(("pickle", "", "none", "msgpac")))
    return header


def _with_other_rows(chance: random.Random, header: Header, body: bytes) -> tuple[Header, bytes]:
    """Return another size table, sometimes with the checksums that its sender would announce."""
    table_nbytes = header.buffer_count * ROW_NBYTES
    rows = [
        SizeRow(int.from_bytes(body[at : at + 8], "little"), body[at + 8])
        for at in range(0, table_nbytes, ROW_NBYTES)
    ]
    at = chance.randrange(len(rows))
    nbytes = chance.choice((rows[at].nbytes, chance.choice(drawn.EXTREMES)))
    rows[at] = SizeRow(nbytes, chance.randrange(8))
    rest = body[table_nbytes:]
    if chance.random() < 0.5:
        packed = sum(row.nbytes for row in rows if row.is_packed)
        large = sum(row.nbytes for row in rows if not row.is_packed)
        rest = rest[: header.meta_nbytes].ljust(header.meta_nbytes + packed, b"\0")
        header = header._replace(
            body_nbytes=table_nbytes + len(rest), payload_nbytes=large % (1 << 64)
        )
    return header, pack_table(rows) + rest
