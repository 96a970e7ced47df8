"""``python docs/draw.py``: draw the pictures of architecture.md from its own table.

Writes SVG for light and for dark pages, as wide as a telephone shows it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

_DOCS = Path(__file__).parent
_WIDTH = 420
_MARGIN = 10
_LINE = 16
_LETTER = 6.7  # how wide one is, in 11 px monospace
_INDENT = 40


@dataclass(frozen=True, slots=True)
class Colours:
    """What one scheme paints with."""

    text: str
    faint: str
    line: str
    bands: tuple[str, ...]


SCHEMES = {
    "light": Colours("#1f2328", "#6e7781", "#57606a", ("#e7f0fa", "#f3f5f7")),
    "dark": Colours("#e2e4e9", "#9aa4af", "#8b949e", ("#1d3450", "#2b303b")),
}

#: One broadcast: who does what, on the source, then on a rank that receives.
SENDING = (
    ("_collectives.broadcast", "broadcast(obj, src=0)"),
    ("_calls.call", "arguments become a group, a root, a header"),
    ("_codecs.pickle5", "object → codec's bytes and large buffers, before any traffic"),
    ("_wire.message", "a head of up to 1.5 MiB; what is larger follows"),
    ("_algorithms.routes", "who gets it from whom"),
    ("_algorithms.exchange", "head, then each buffer from its own memory"),
)
RECEIVING = (
    ("_transport.lane", "a receive stood ready"),
    (
        "_wire.admission",
        "layout, checksum, signature; is it this call? limits, before room is made",
    ),
    ("_codecs.buffers", "room for each buffer, once"),
    ("_algorithms.exchange", "buffers arrive in it, and are passed on piece by piece"),
    ("_codecs.pickle5", "bytes and buffers → object"),
    ("_collectives.broadcast", "returns it, or raises what all ranks raise"),
)


def rooms(page: str) -> list[tuple[int, str, list[str]]]:
    """Each room's floor, name and modules, from below, as architecture.md lists them."""
    found = []
    for line in page.splitlines():
        if line.startswith("| ") and line[2].isdigit():
            _, floor, name, modules, *_ = line.split("|")
            names = [each for cell in modules.split(",") if (each := cell.strip(" `–"))]
            found.append((int(floor), name.strip(" `"), names))
    return found


def house(table: Sequence[tuple[int, str, list[str]]], colours: Colours) -> Iterator[str]:
    """The rooms, the highest floor on top, those of one floor in one colour."""
    bodies: list[str] = []
    y = _MARGIN
    for floor, room, names in reversed(table):
        lines = list(_wrapped(names, _WIDTH - 2 * _MARGIN - _INDENT, "  "))
        height = _LINE * (len(lines) + 1) + 10
        bodies += _band(y, height, f"{floor}", room, lines, colours)
        y += height + 4
    yield from _frame("The rooms of objcomm, floor by floor", y + _MARGIN, colours)
    yield from bodies
    yield "</svg>"


def walk(colours: Colours) -> Iterator[str]:
    """One message, from the call on one rank to the return on another."""
    column = (_WIDTH - 3 * _MARGIN) // 2
    right = 2 * _MARGIN + column
    bodies = [
        _title(_MARGIN, "the source", colours),
        _title(right, "a rank that receives", colours),
    ]
    bodies += _column(_MARGIN, column, SENDING, colours)
    bottom = 34 + sum(_height(column, each) + 12 for each in SENDING)
    bodies += _column(right, column, RECEIVING, colours)
    bottom = max(bottom, 34 + sum(_height(column, each) + 12 for each in RECEIVING))
    x, below = _MARGIN + column // 2, 34 + sum(_height(column, each) + 12 for each in SENDING) - 12
    middle = _MARGIN + column + _MARGIN // 2
    bodies.append(
        f'<path d="M{x} {below}V{bottom + 8}H{middle}V44H{right - 1}" fill="none" '
        f'stroke="{colours.line}" stroke-width="1.5" stroke-dasharray="5 3" marker-end="url(#a)"/>'
    )
    yield from _frame("One broadcast, from the call to the return", bottom + 18, colours)
    yield from bodies
    yield "</svg>"


def draw() -> dict[str, str]:
    """Each file's name in ``docs/assets``, and what is to stand in it."""
    table = rooms((_DOCS / "architecture.md").read_text(encoding="utf-8"))
    drawn = {}
    for scheme, colours in SCHEMES.items():
        drawn[f"rooms-{scheme}.svg"] = "\n".join(house(table, colours)) + "\n"
        drawn[f"walk-{scheme}.svg"] = "\n".join(walk(colours)) + "\n"
    return drawn


def _frame(title: str, height: int, colours: Colours) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'font-family="ui-monospace, monospace" font-size="11" fill="{colours.text}">'
    )
    yield f"<title>{escape(title)}</title>"
    yield (
        '<marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{colours.line}"/></marker>'
    )


def _wrapped(words: Sequence[str], width: int, gap: str) -> Iterator[str]:
    line = ""
    for word in words:
        longer = f"{line}{gap}{word}" if line else word
        if len(longer) * _LETTER > width:
            yield line
            longer = word
        line = longer
    yield line


def _band(  # noqa: PLR0917  # one rectangle and what stands in it
    y: int, height: int, number: str, title: str, lines: Sequence[str], colours: Colours
) -> Iterator[str]:
    yield (
        f'<rect x="{_MARGIN}" y="{y}" width="{_WIDTH - 2 * _MARGIN}" height="{height}" rx="5" '
        f'fill="{colours.bands[int(number) % 2]}"/>'
    )
    yield f'<text x="{_MARGIN + 8}" y="{y + 17}" fill="{colours.faint}">{number}</text>'
    yield f'<text x="{_INDENT}" y="{y + 17}" font-weight="600">{escape(title)}</text>'
    for at, line in enumerate(lines, 1):
        below = y + 17 + _LINE * at
        yield (
            f'<text x="{_INDENT}" y="{below}" fill="{colours.faint}" xml:space="preserve">'
            f"{escape(line)}</text>"
        )


def _title(x: int, text: str, colours: Colours) -> str:
    return (
        f'<text x="{x}" y="20" font-family="system-ui, sans-serif" font-size="13" '
        f'font-weight="600" fill="{colours.faint}">{escape(text)}</text>'
    )


def _said(column: int, what: str) -> list[str]:
    return list(_wrapped(what.split(), column - 14, " "))


def _height(column: int, step: tuple[str, str]) -> int:
    return _LINE * (1 + len(_said(column, step[1]))) + 10


def _column(
    x: int, column: int, steps: Sequence[tuple[str, str]], colours: Colours
) -> Iterator[str]:
    y = 34
    for at, (module, what) in enumerate(steps):
        height = _height(column, (module, what))
        yield (
            f'<rect x="{x}" y="{y}" width="{column}" height="{height}" rx="5" '
            f'fill="{colours.bands[0]}"/>'
        )
        yield f'<text x="{x + 7}" y="{y + 16}" font-weight="600">{escape(module)}</text>'
        for line_at, line in enumerate(_said(column, what)):
            yield (
                f'<text x="{x + 7}" y="{y + 16 + _LINE * (line_at + 1)}" '
                f'fill="{colours.faint}">{escape(line)}</text>'
            )
        y += height
        if at + 1 < len(steps):
            middle = x + column // 2
            yield (
                f'<path d="M{middle} {y}V{y + 11}" stroke="{colours.line}" stroke-width="1.5" '
                'marker-end="url(#a)"/>'
            )
        y += 12


if __name__ == "__main__":
    for file, text in draw().items():
        (_DOCS / "assets" / file).write_text(text, encoding="utf-8")
