"""``python docs/draw.py``: draw the pictures of the pages, except those of benchmarks.

Writes SVG for light and for dark pages, as wide as a telephone shows it.
"""

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from objcomm._algorithms import topology

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
    error: str


SCHEMES = {
    "light": Colours("#1f2328", "#6e7781", "#57606a", ("#e7f0fa", "#f3f5f7"), "#bc4c00"),
    "dark": Colours("#e2e4e9", "#9aa4af", "#8b949e", ("#1d3450", "#2b303b"), "#f0883e"),
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

#: What happens when rank 2 dies; each step has a place in the picture.
DEATH = (
    "Rank 2 is killed.",
    "The kernel closes its sockets, and reports its end to rank 1, on the same host.",
    "Rank 1 writes the verdict to the store, unless there is one already.",
    "Rank 1 closes its connections. Rank 0, on another host, notices that and reads the verdict.",
    "Both raise the same TransportError, within 2 s.",
)

_HOSTS, _RANKS_PER_HOST = 5, 4


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


def death(colours: Colours) -> Iterator[str]:
    """Draw what each rank does after one has died, the time from left to right."""
    rows = {"rank 0": 28, "store": 76, "rank 1": 124, "rank 2": 172}
    start, killed, noticed, posted, read, raised, end = 60, 146, 196, 242, 294, 330, 410
    letters = int((_WIDTH - _INDENT - _MARGIN) / _LETTER)
    captions = [textwrap.wrap(caption, letters) for caption in DEATH]
    top = rows["rank 2"] + 44
    height = top + _LINE * sum(map(len, captions))
    yield from _frame("What happens when a rank dies", height, colours)
    for row, y in rows.items():
        yield f'<text x="{_MARGIN}" y="{y + 4}" font-weight="600">{row}</text>'
    for row in ("rank 0", "rank 1"):
        yield from _bar(rows[row], start, raised, "all_gather", colours)
        yield from _bar(rows[row], raised, end, "  raises", colours, is_error=True)
        yield from _disc(raised, rows[row], 8, "5", colours)
    yield from _bar(rows["rank 2"], start, killed, "all_gather", colours)
    yield from _bar(rows["store"], posted, end, "rank 2 is lost", colours)
    yield from _disc(killed, rows["rank 2"], 8, "1", colours)
    arrows = {
        2: (noticed, "rank 2", "rank 1"),
        3: (posted + 20, "rank 1", "store"),
        4: (read, "store", "rank 0"),
    }
    for number, (x, since, until) in arrows.items():
        begin = f"M{killed + 8} {rows[since]}H{x}" if number == 2 else f"M{x} {rows[since] - 11}"  # noqa: PLR2004  # from where it ended
        yield _arrow(f"{begin}V{rows[until] + 12}", colours)
        yield from _disc(x - 13, rows[since] - 24, 8, f"{number}", colours)
    y = top
    for number, lines in enumerate(captions, 1):
        yield f'<text x="{_MARGIN + 8}" y="{y}" font-weight="600">{number}</text>'
        for line in lines:
            yield f'<text x="{_INDENT}" y="{y}" fill="{colours.faint}">{escape(line)}</text>'
            y += _LINE
    yield "</svg>"


def trees(colours: Colours) -> Iterator[str]:
    """Draw how a small broadcast reaches the ranks of several hosts."""
    hosts = tuple(rank // _RANKS_PER_HOST for rank in range(_HOSTS * _RANKS_PER_HOST))
    children = topology.tree(0, 0, hosts).children
    firsts = [rank for rank in children if hosts[rank] != hosts[0]]
    beside = [rank for rank in children if hosts[rank] == hosts[0]]
    width = (_WIDTH - 2 * _MARGIN - 5 * (len(firsts) - 1)) // len(firsts)
    middles = [_MARGIN + (width + 5) * at + width // 2 for at in range(len(firsts))]
    yield from _frame("One broadcast among the ranks of several hosts", 262, colours)
    yield from _box(104, 10, 212, 88, "host 0", colours)
    for rank, middle in zip(firsts, middles, strict=True):
        yield from _box(middle - width // 2, 128, width, 124, f"host {hosts[rank]}", colours)
    root = (132, 50)
    places = [(root[0] + 50 * at, root[1]) for at in range(1, len(beside) + 1)]
    yield from _served(root, dict(zip(beside, places, strict=True)), 22, colours)
    places = [(middle, 160) for middle in middles]
    yield from _served(root, dict(zip(firsts, places, strict=True)), 113, colours)
    yield from _disc(*root, 12, "0", colours)
    for first, (x, y) in zip(firsts, places, strict=True):
        others = topology.tree(first, 0, hosts).children
        left = x - 29 * (len(others) - 1) // 2
        below = {other: (left + 29 * at, y + 56) for at, other in enumerate(others)}
        yield from _served((x, y), below, y + 28, colours)
        yield from _disc(x, y, 12, f"{first}", colours)
    yield "</svg>"


def recording(recorded: Mapping[str, Any], colours: Colours) -> Iterator[str]:
    """Draw what commands printed, with the seconds since all ranks had joined."""
    gutter = 54
    letters = int((_WIDTH - gutter - 2 * _MARGIN) / _LETTER)
    bodies: list[str] = []
    y = _MARGIN
    for name, run in recorded.items():
        x, below, shown = _MARGIN + 8, y + 17 + _LINE, ""
        command = escape(f"$ {run['command']}")
        texts = [
            f'<text x="{x}" y="{y + 17}" fill="{colours.faint}">{escape(name)}</text>',
            f'<text x="{x}" y="{below}" font-weight="600">{command}</text>',
        ]
        for seconds, line in run["printed"]:
            time = f"{max(0.0, seconds):.2f} s" if seconds > -0.1 else ""  # noqa: PLR2004  # joining
            if time != shown:
                texts.append(_time(gutter, below + _LINE, time, colours))
                shown = time
            fill = colours.error if "Error: " in line else colours.text
            for piece in textwrap.wrap(line, letters, subsequent_indent="  "):
                below += _LINE
                texts.append(
                    f'<text x="{gutter + 8}" y="{below}" fill="{fill}" xml:space="preserve">'
                    f"{escape(piece)}</text>"
                )
        if run["seconds"]:
            below += _LINE
            texts.append(_time(gutter, below, f"{run['seconds']} s", colours))
            texts.append(
                f'<text x="{gutter + 8}" y="{below}" fill="{colours.faint}" '
                'font-style="italic">nothing more; stopped here</text>'
            )
        height = below + 11 - y
        bodies.append(
            f'<rect x="{_MARGIN}" y="{y}" width="{_WIDTH - 2 * _MARGIN}" height="{height}" rx="5" '
            f'fill="{colours.bands[1]}"/>'
        )
        bodies += texts
        y += height + 6
    yield from _frame("The same program with torch and with objcomm", y + 4, colours)
    yield from bodies
    yield "</svg>"


def draw() -> dict[str, str]:
    """Return the pictures' text by their names in ``docs/assets``."""
    table = rooms((_DOCS / "architecture.md").read_text(encoding="utf-8"))
    recorded = json.loads((_DOCS / "desync.json").read_text(encoding="utf-8"))
    drawn = {}
    for scheme, colours in SCHEMES.items():
        for name, lines in {
            "rooms": house(table, colours),
            "walk": walk(colours),
            "death": death(colours),
            "trees": trees(colours),
            "desync": recording(recorded, colours),
        }.items():
            drawn[f"{name}-{scheme}.svg"] = "\n".join(lines) + "\n"
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


def _bar(
    y: int, left: int, right: int, text: str, colours: Colours, *, is_error: bool = False
) -> Iterator[str]:
    fill = colours.error if is_error else colours.bands[0]
    ink = colours.bands[1] if is_error else colours.text
    yield f'<rect x="{left}" y="{y - 11}" width="{right - left}" height="22" rx="3" fill="{fill}"/>'
    yield (
        f'<text x="{left + 6}" y="{y + 4}" fill="{ink}" xml:space="preserve">{escape(text)}</text>'
    )


def _box(  # noqa: PLR0917  # a rectangle and its title
    x: int, y: int, width: int, height: int, title: str, colours: Colours
) -> Iterator[str]:
    yield (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" '
        f'fill="{colours.bands[0]}"/>'
    )
    yield (
        f'<text x="{x + width / 2:g}" y="{y + height - 10}" text-anchor="middle" '
        f'fill="{colours.faint}">{escape(title)}</text>'
    )


def _disc(x: int, y: int, radius: int, text: str, colours: Colours) -> Iterator[str]:
    yield f'<circle cx="{x}" cy="{y}" r="{radius}" fill="{colours.text}"/>'
    yield (
        f'<text x="{x}" y="{y + 4}" text-anchor="middle" font-weight="600" '
        f'fill="{colours.bands[1]}">{text}</text>'
    )


def _served(
    since: tuple[int, int],
    ranks: Mapping[int, tuple[int, int]],
    level: int,
    colours: Colours,
) -> Iterator[str]:
    """Draw ranks, each with an arrow that turns at ``level``."""
    for rank, (x, y) in ranks.items():
        yield _arrow(f"M{since[0]} {since[1]}V{level}H{x}V{y - 13}", colours)
        yield from _disc(x, y, 12, f"{rank}", colours)


def _arrow(path: str, colours: Colours) -> str:
    return (
        f'<path d="{path}" fill="none" stroke="{colours.line}" stroke-width="1.5" '
        'marker-end="url(#a)"/>'
    )


def _time(x: int, y: int, text: str, colours: Colours) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="end" fill="{colours.faint}">{text}</text>'


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
