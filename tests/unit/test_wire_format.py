"""The page that describes the bytes, compared with the bytes."""

import re
from pathlib import Path
from typing import Any

from objcomm._codecs.buffers import BufferKind
from objcomm._wire import header
from objcomm._wire.header import HEADER_NBYTES, MAGIC, VERSION, Header, Operation, SizeRow, Status

PAGE = (Path(__file__).parents[2] / "docs" / "wire-format.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    section = PAGE.split(f"## {heading}")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if re.match(r"\| *\d", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_fields_are_where_the_page_says() -> None:
    values: dict[str, Any] = {"root": -1, "codec": "msgpack", "call_site": "train.py:10"}
    wanted = {"magic": MAGIC, "version": bytes([VERSION]), "root": b"\xff" * 4}
    wanted |= {"codec": b"msgpack".ljust(16, b"\0"), "call_site": b"train.py:10".ljust(64, b"\0")}
    for at, (_, size, name, _) in enumerate(rows("The header")):
        if name in Header._fields and name not in values:
            raw = wanted[name] = bytes(range(at, at + int(size)))
            is_number = name not in ("digest", "signature")
            values[name] = int.from_bytes(raw, "little") if is_number else raw
    packed, end = Header(**values).pack(), 0
    for offset, size, name, _ in rows("The header"):
        assert int(offset) == end
        end += int(size)
        if name != "checksum":
            assert packed[int(offset) : end] == wanted.get(name, bytes(int(size))), name
    assert len(packed) == HEADER_NBYTES == end


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
