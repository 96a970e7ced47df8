"""The pictures: our times as shares of torch's, at the world that is judged, on a logarithmic axis.

SVG, written here: text keeps the size that it was given, so a telephone can show it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from bench.case import CASES, JUDGED_WORLD, SECONDS
from bench.results import OURS, Results

_BASELINE = "torch"

#: What the home page shows: small and large, and where objcomm is slower.
_HEADLINE = (
    "broadcast: config dict, 1 KiB",
    'broadcast: {"w": 128 MiB ndarray}',
    "gather: small dict",
    "gather: 64 MiB of bytes on rank 1, 1 KiB elsewhere",
    "all_gather: small dict",
    "all_gather: 8 MiB array per rank",
    "scatter: small dict",
    "all_to_all: small dict",
    "all_reduce: small custom object",
    "run_on_main: small dict",
    "barrier: nothing",
)

# In units of the picture, which is as wide as a telephone's page, nearly.
_WIDTH = 420
_MARGIN = 10
_HEAD = 44
_ROW = 38
_FOOT = 26
_FIGURES = 44  # room for them, to the right of the axis
_TICKS = (0.01, 0.1, 1.0)


@dataclass(frozen=True, slots=True)
class Colours:
    """Of a picture, for one kind of page."""

    text: str
    faint: str
    faster: str
    slower: str


PALETTES = {
    "light": Colours(text="#1f2328", faint="#8c959f", faster="#2f6fb0", slower="#bc4c00"),
    "dark": Colours(text="#e2e4e9", faint="#7d8590", faster="#6cb0f5", slower="#f0883e"),
}


def shares(results: Results) -> dict[str, float]:
    """Per case, our median over that of torch's object collective; the smallest first.

    Without the cases of several payloads: they make a table, and too many bars.
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
        False, and no file, where there is nothing to compare.
    """
    bars = shares(results)
    if not bars:
        return False
    folder.mkdir(exist_ok=True)
    headline = {name: bars[name] for name in bars if name in _HEADLINE}
    for name, shown in (("benchmarks", bars), ("headline", headline or bars)):
        for scheme, colours in PALETTES.items():
            text = "\n".join(_picture(shown, colours)) + "\n"
            (folder / f"{name}-{scheme}.svg").write_text(text, encoding="utf-8")
    return True


def _picture(bars: Mapping[str, float], colours: Colours) -> Iterator[str]:
    height = _HEAD + _ROW * len(bars) + _FOOT
    title = f"time of objcomm as a share of torch's object collective, {JUDGED_WORLD} ranks"
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'role="img" font-family="system-ui, sans-serif" font-size="13" fill="{colours.text}">'
    )
    yield f"<title>{escape(title)}</title>"
    yield f'<text x="{_MARGIN}" y="16" font-weight="600">Time, as a share of torch\'s</text>'
    note = f"{JUDGED_WORLD} ranks, one machine, torch over Gloo; the farther left of 1, the faster"
    yield f'<text x="{_MARGIN}" y="33" font-size="12" fill="{colours.faint}">{note}</text>'
    left, scale = _axis(bars)
    for tick in _TICKS:
        x = _MARGIN + scale * (math.log10(tick) - left)
        if x >= _MARGIN:
            top = _HEAD if tick == 1 else height - _FOOT - 5
            yield _line(x, top, height - _FOOT, colours.faint)
            yield (
                f'<text x="{x:.0f}" y="{height - 8}" font-size="12" text-anchor="middle" '
                f'fill="{colours.faint}">{tick:g}</text>'
            )
    for at, (name, share) in enumerate(bars.items()):
        one, end = (_MARGIN + scale * (math.log10(value) - left) for value in (1, share))
        yield from _bar(name, share, _HEAD + _ROW * at, sorted((one, end)), colours)
    yield "</svg>"


def _axis(bars: Mapping[str, float]) -> tuple[float, float]:
    """The logarithm at the left edge, and units for each power of ten."""
    left = math.log10(min(0.05, *bars.values()) / 1.5)
    right = math.log10(max(1.3, *bars.values()))
    return left, (_WIDTH - 2 * _MARGIN - _FIGURES) / (right - left)


def _bar(name: str, share: float, y: int, ends: Sequence[float], colours: Colours) -> Iterator[str]:
    operation, _, payload = name.partition(": ")
    colour = colours.faster if share < 1 else colours.slower
    yield (
        f'<text x="{_MARGIN}" y="{y + 15}">{escape(operation)}'
        f'<tspan fill="{colours.faint}" font-size="12"> {escape(payload)}</tspan></text>'
    )
    yield (
        f'<text x="{_WIDTH - _MARGIN}" y="{y + 15}" text-anchor="end" font-weight="600" '
        f'fill="{colour}">{share:.2f}</text>'
    )
    yield (
        f'<rect x="{ends[0]:.1f}" y="{y + 21}" width="{ends[1] - ends[0]:.1f}" height="8" rx="2" '
        f'fill="{colour}"/>'
    )


def _line(x: float, top: int, bottom: int, colour: str) -> str:
    return f'<path d="M{x:.1f} {top}V{bottom}" stroke="{colour}" stroke-width="1"/>'
