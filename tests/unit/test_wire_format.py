"""The page that describes the bytes, compared with the bytes."""

import re
import struct
from pathlib import Path

from objcomm._codecs.buffers import BufferKind
from objcomm._wire import header
from objcomm._wire.header import HEADER_NBYTES, MAGIC, VERSION, Header, Operation, SizeRow, Status

PAGE = (Path(__file__).parents[2] / "docs" / "wire-format.md").read_text(encoding="utf-8")

HEADER = Header(
    status=Status.TREE,
    flags=1,
    operation=Operation.ALL_GATHER_SCALAR,
    sender=7,
    root=-1,
    lane=4000,
    epoch=3,
    group=1 << 31,
    sequence=1 << 40,
    fingerprint=12345,
    codec="msgpack",
    call_site="train.py:10",
    buffer_count=2,
    meta_nbytes=5,
    body_nbytes=100,
    payload_nbytes=1 << 60,
    tag=99,
    destination=3,
    number=5,
    digest=bytes(range(32)),
    signature=bytes(range(32, 64)),
    body_checksum=77,
)


def rows(heading: str) -> list[list[str]]:
    section = PAGE.split(f"## {heading}")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if re.match(r"\| *\d", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_fields_lie_where_the_page_says() -> None:
    packed = HEADER.pack()
    assert len(packed) == HEADER_NBYTES == sum(int(size) for _, size, *_ in rows("The header"))
    expected_offset = 0
    for offset, size, name, _ in rows("The header"):
        assert int(offset) == expected_offset
        expected_offset += int(size)
        raw = packed[int(offset) : expected_offset]
        if name in ("sender", "root", "destination"):
            assert struct.unpack("<i", raw)[0] == getattr(HEADER, name)
        elif name in ("codec", "call_site"):
            assert raw.rstrip(b"\0").decode() == getattr(HEADER, name)
        elif name in ("digest", "signature"):
            assert raw == getattr(HEADER, name)
        elif name in Header._fields:
            assert int.from_bytes(raw, "little") == getattr(HEADER, name), name
        elif name == "magic":
            assert raw == MAGIC
        elif name == "version":
            assert raw == bytes([VERSION])
        elif name != "checksum":
            assert raw == bytes(int(size)), name


def test_the_page_lists_every_number() -> None:
    (status,) = (row for row in rows("The header") if row[2] == "status")
    (operation,) = (row for row in rows("The header") if row[2] == "operation")
    assert status[3] == ", ".join(f"{each.value} {each.name.lower()}" for each in Status)
    assert operation[3] == ", ".join(f"{each.value} {each.name.lower()}" for each in Operation)
    assert [int(row[0]) for row in rows("The body")] == [kind.value for kind in BufferKind]


def test_the_page_names_the_constants() -> None:
    assert f"the window of {header.WINDOW_NBYTES} bytes" in PAGE
    assert f"rows of {header.ROW_NBYTES} bytes" in PAGE
    assert header.pack_table([SizeRow(3, 1)]) == b"\x03" + bytes(7) + b"\x01"
