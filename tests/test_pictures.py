"""The pictures of the documentation match their sources."""

import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest

import bench.suites  # noqa: F401  # declares the cases that are judged
from bench import gpu, plot, report
from bench.case import JUDGED_WORLD
from bench.model import page as scale
from bench.model.results import Results as Scale
from bench.results import Results
from tests.modules import MODULES

_DOCS = Path(__file__).parents[1] / "docs"
_FIGURES = _DOCS / "benchmarks.jsonl"
_PICTURES = sorted((_DOCS / "assets").glob("*.svg"))

_spec = importlib.util.spec_from_file_location("draw", _DOCS / "draw.py")
assert _spec is not None
assert _spec.loader is not None
draw = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(draw)


@pytest.mark.parametrize("name", draw.draw())
def test_a_picture_is_drawn_from_its_source(name: str) -> None:
    drawn = (_DOCS / "assets" / name).read_text(encoding="utf-8")
    assert drawn == draw.draw()[name], "run: python docs/draw.py"


def test_the_picture_shows_every_room_and_every_module() -> None:
    picture = (_DOCS / "assets" / "rooms-light.svg").read_text(encoding="utf-8")
    shown = picture.replace("<", " ").replace(">", " ").split()
    for name in MODULES:
        room, _, module = name.partition(".")
        is_folder = MODULES[name].name == "__init__.py"
        assert (room or "__init__") in shown
        assert is_folder or not module or module in shown


def test_the_walk_names_modules_that_exist() -> None:
    for module, _ in (*draw.SENDING, *draw.RECEIVING):
        assert module in MODULES


def test_the_benchmarks_are_drawn_from_the_recorded_figures(tmp_path: Path) -> None:
    results = Results.load([_FIGURES])
    assert plot.draw(results, tmp_path)
    for picture in tmp_path.iterdir():
        drawn = (_DOCS / "assets" / picture.name).read_text(encoding="utf-8")
        assert drawn == picture.read_text(encoding="utf-8"), "run: python -m bench report"
    page = report.page(results, is_drawn=True)
    assert page == (_DOCS / "benchmarks.md").read_text(encoding="utf-8")
    targets = report.scoreboard(results)
    assert targets == (_DOCS / "targets.md").read_text(encoding="utf-8")


# Average width of a letter, relative to the font size. In DejaVu Sans, one of the widest common
# fonts, it is 0.54 and 0.60 for these texts; in monospace fonts it is about 0.60.
_LETTER, _BOLD_LETTER, _MONOSPACE_LETTER = 0.62, 0.72, 0.61


def length_of(text: ElementTree.Element, inherited: Mapping[str, str]) -> float:
    style = {**inherited, **text.attrib}
    letter = _BOLD_LETTER if "font-weight" in style else _LETTER
    if "monospace" in style["font-family"]:
        letter = _MONOSPACE_LETTER
    own = float(style["font-size"]) * letter * len(text.text or "")
    return own + sum(float(span.get("dx", 0)) + length_of(span, style) for span in text)


@pytest.mark.parametrize("path", _PICTURES, ids=[path.stem for path in _PICTURES])
def test_no_text_of_a_picture_is_cut_off(path: Path) -> None:
    root = ElementTree.parse(path).getroot()  # noqa: S314  # our own
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    texts = list(root.iter("{http://www.w3.org/2000/svg}text"))
    assert len(texts) > 15
    for text in texts:
        length = length_of(text, root.attrib)
        anchor = {"start": 0.0, "middle": 0.5, "end": 1.0}[text.get("text-anchor", "start")]
        left = float(text.attrib["x"]) - anchor * length
        assert left >= 0
        assert left + length <= width, "".join(text.itertext())
        assert 0 < float(text.attrib["y"]) < height


def test_each_picture_is_on_a_page_in_light_and_dark() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in _DOCS.rglob("*.md"))
    shown = set(re.findall(r"assets/([\w-]+)\.svg#only-(?:light|dark)", pages))
    assert shown == {path.stem for path in _PICTURES}
    assert len(re.findall(r"-light\.svg#only-light", pages)) == len(
        re.findall(r"-dark\.svg#only-dark", pages)
    )


def test_the_recording_shows_the_error_of_the_readmes_program() -> None:
    readme = (_DOCS.parent / "README.md").read_text(encoding="utf-8")
    shown = re.search(
        r"^```py\n(.*?)^```$.*?^```pytb\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE
    )
    assert shown is not None
    torchs, ours = json.loads((_DOCS / "desync.json").read_text(encoding="utf-8")).values()
    raised = [(at, line) for at, line in ours["printed"] if "Error: " in line]
    assert {line.partition("]: ")[2] for _, line in raised} == {" ".join(shown[2].split())}
    assert len(raised) == 2
    assert all(at < 2 for at, _ in raised)
    assert [line for at, line in torchs["printed"] if at > 0] == []
    assert torchs["seconds"] == 60
    for line in shown[1].splitlines():
        if line.startswith("    "):
            assert any(line.strip() in printed for _, printed in ours["printed"])


def test_the_readme_states_what_its_picture_shows() -> None:
    shares = plot.shares(Results.load([_FIGURES]))
    shown = [shares[name] for name in plot._HEADLINE]  # noqa: SLF001  # the picture's values
    readme = (_DOCS.parent / "README.md").read_text(encoding="utf-8")
    least, most = (plot.figure(1 / share) for share in (max(shown), min(shown)))
    assert f'collectives: from {least} to {most}"' in readme
    large = shares["all_gather: 8 MiB array per rank"]
    assert "`all_gather` of 8 MiB from each of four ranks takes a twelfth of torch's time" in readme
    assert round(1 / large) == 12
    assert JUDGED_WORLD == 4


def test_the_page_of_many_ranks_is_made_from_the_recorded_figures(tmp_path: Path) -> None:
    results = Scale.load(_DOCS / "scale.jsonl")
    results.write(tmp_path / "again")
    assert Scale.load(tmp_path / "again") == results
    page = scale.page(results)
    written = (_DOCS / "guide" / "scale.md").read_text(encoding="utf-8")
    assert page == written, "run: python -m bench.model report"
    for name, picture in scale.pictures(results).items():
        assert picture == (_DOCS / "assets" / name).read_text(encoding="utf-8")


def test_the_page_of_a_gpu_is_made_from_the_recorded_figures() -> None:
    page = gpu.page(Results.load([_DOCS / "gpu.jsonl"]))
    written = (_DOCS / "gpu-benchmarks.md").read_text(encoding="utf-8")
    assert page == written, "run: python -m bench.gpu report"


def test_the_model_recorded_for_many_ranks_sends_what_real_ranks_sent() -> None:
    results = Scale.load(_DOCS / "scale.jsonl")
    ours = [each for each in results.counted if each.peer == "objcomm"]
    assert {each.size for each in ours} >= {8, 16, 64}
    assert all(each.is_as_modelled for each in ours)
    assert max(each.size for each in results.modelled) == 4096
