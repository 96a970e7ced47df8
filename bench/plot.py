"""Draw how many times as fast as torch objcomm is, at the judged world size.

The SVG is written by hand so that its text keeps its size and is legible on a phone. Fonts differ
in width, so each text has space for the widest common ones.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from bench.case import CASES, JUDGED_WORLD, SECONDS
from bench.results import OURS, Results

_BASELINE = "torch"

#: The cases on the home page: a small and a large one of each, and the one with the least gain.
_HEADLINE = (
    "broadcast: config dict, 1 KiB",
    'broadcast: {"w": 128 MiB ndarray}',
    "gather: small dict",
    "gather: 64 MiB of bytes on rank 1, 1 KiB elsewhere",
    "all_gather: small dict",
    "all_gather: 8 MiB array per rank",
    "barrier: nothing",
)

# In units of the picture, which is nearly as wide as a page on a phone.
_WIDTH = 420
_MARGIN = 10
_ROW = 40
_FOOT = 48
_FIGURES = 56  # space for the figure after the longest bar
# If the longest bar would exceed this multiple of torch's, the axis is logarithmic.
_LINEAR_MAX = 20.0


@dataclass(frozen=True, slots=True)
class Colours:
    """The colors of a picture for one color scheme."""

    text: str
    faint: str
    faster: str
    slower: str


PALETTES = {
    "light": Colours(text="#1f2328", faint="#6e7781", faster="#2f6fb0", slower="#bc4c00"),
    "dark": Colours(text="#e2e4e9", faint="#9aa4af", faster="#6cb0f5", slower="#f0883e"),
}


def shares(results: Results) -> dict[str, float]:
    """Return for each case our median divided by torch's, the smallest first.

    Cases of several payloads are left out: they have a table, and would be too many bars.
    """
    listed = {
        (each.operation, payload)
        for each in CASES
        if len(each.payloads) > 1
        for payload in each.payloads
    }
    found: dict[str, float] = {}
    for record in results:
        is_ours = (record.peer, record.metric, record.world) == (OURS, SECONDS, JUDGED_WORLD)
        baseline = results.find(record, _BASELINE)
        if is_ours and baseline and (record.operation, record.payload) not in listed:
            found[f"{record.operation}: {record.payload}"] = record.median / baseline.median
    return dict(sorted(found.items(), key=lambda item: item[1]))


def draw(results: Results, folder: Path) -> bool:
    """Write ``benchmarks-*.svg`` and ``headline-*.svg``, each for light and for dark pages.

    Returns:
        Whether the files were written; False if there is nothing to compare.
    """
    bars = shares(results)
    if not bars:
        return False
    folder.mkdir(exist_ok=True)
    headline = {name: bars[name] for name in bars if name in _HEADLINE}
    for name, shown in (("benchmarks", bars), ("headline", headline or bars)):
        for scheme, colours in PALETTES.items():
            lines = _picture(shown, colours, has_claim=name == "headline")
            text = "\n".join(lines) + "\n"
            (folder / f"{name}-{scheme}.svg").write_text(text, encoding="utf-8")
    return True


def _picture(
    bars: Mapping[str, float], colours: Colours, *, has_claim: bool = False
) -> Iterator[str]:
    """Yield the lines of a picture; ``has_claim`` shows the fastest case as one large figure."""
    head = 84 if has_claim else 50
    height = head + _ROW * len(bars) + _FOOT
    speeds = {name: 1 / share for name, share in bars.items()}
    title = f"how many times as fast as torch's object collectives objcomm is, {JUDGED_WORLD} ranks"
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'role="img" font-family="system-ui, sans-serif" font-size="13" fill="{colours.text}">'
    )
    yield f"<title>{escape(title)}</title>"
    if has_claim:
        most = f"{math.floor(max(speeds.values()))} ×"
        yield (
            f'<text x="{_MARGIN}" y="44" font-size="17" font-weight="600">up to '
            f'<tspan font-size="40" fill="{colours.faster}">{most}</tspan>'
            "<tspan> as fast as torch</tspan></text>"
        )
    else:
        yield (
            f'<text x="{_MARGIN}" y="18" font-size="15" font-weight="600">'
            "How many times as fast as torch</text>"
        )
    note = f"{JUDGED_WORLD} ranks, one machine, torch over Gloo, median times"
    yield (
        f'<text x="{_MARGIN}" y="{head - 13}" font-size="12" fill="{colours.faint}">{note}</text>'
    )
    start, place, ticks = _axis(speeds.values())
    bottom = height - _FOOT
    for tick in ticks:
        x = place(tick)
        yield _line(x, bottom, bottom + 5, colours.faint)
        label, anchor = ("torch", "start") if tick == 1 else (f"{tick:g} ×", "middle")
        yield (
            f'<text x="{x:.0f}" y="{bottom + 18}" font-size="12" text-anchor="{anchor}" '
            f'fill="{colours.faint}">{label}</text>'
        )
    is_linear = start == 0
    axis = "times as fast as torch" + ("" if is_linear else " (logarithmic)")
    yield (
        f'<text x="{_MARGIN + (_WIDTH - 2 * _MARGIN - _FIGURES) / 2:.0f}" y="{bottom + 36}" '
        f'font-size="12" text-anchor="middle" fill="{colours.faint}">{axis}</text>'
    )
    for at, (name, speed) in enumerate(speeds.items()):
        ends = sorted((place(start), place(speed)))
        y = head + _ROW * at
        yield from _bar(name, speed, y, ends, colours)
        yield _line(place(1.0), y + 18, y + 34, colours.text)  # past the names
    yield "</svg>"


def _axis(
    speeds: Collection[float],
) -> tuple[float, Callable[[float], float], Sequence[float]]:
    """Return the speed at which bars start, the x coordinate of a speed, and the tick marks."""
    width = _WIDTH - 2 * _MARGIN - _FIGURES
    most = max(speeds)
    if most <= _LINEAR_MAX:
        return 0.0, lambda speed: _MARGIN + width * speed / most, [1, *range(5, int(most) + 1, 5)]
    left, right = math.log10(min(1.0, *speeds)), math.log10(most)
    ticks = [10.0**power for power in range(math.ceil(left), int(right) + 1)]
    return (
        1.0,
        lambda speed: _MARGIN + width * (math.log10(speed) - left) / (right - left),
        ticks,
    )


def _bar(name: str, speed: float, y: int, ends: Sequence[float], colours: Colours) -> Iterator[str]:
    operation, _, payload = name.partition(": ")
    colour = colours.faster if speed > 1 else colours.slower
    yield (
        f'<text x="{_MARGIN}" y="{y + 14}">{escape(operation)}'
        f'<tspan fill="{colours.faint}" font-size="12"> {escape(payload)}</tspan></text>'
    )
    yield (
        f'<rect x="{ends[0]:.1f}" y="{y + 20}" width="{ends[1] - ends[0]:.1f}" height="12" rx="2" '
        f'fill="{colour}"/>'
    )
    yield (
        f'<text x="{ends[1] + 6:.1f}" y="{y + 31}" font-size="14" font-weight="600" '
        f'fill="{colour}">{figure(speed)}</text>'
    )


def figure(speed: float) -> str:
    """Format a speed for a picture, such as ``11 ×`` or ``2.4 ×``."""
    digits = 0 if speed >= 10 else 1 if speed >= 2 else 2  # noqa: PLR2004  # at most three digits
    return f"{speed:.{digits}f} ×"


def _line(x: float, top: int, bottom: int, colour: str) -> str:
    return f'<path d="M{x:.1f} {top}V{bottom}" stroke="{colour}" stroke-width="1"/>'
