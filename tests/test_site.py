"""What a reader finds on the built site; ``tests/test_docs.py`` runs the pages' code."""

import itertools
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from mkdocs.config import load_config

from tests.public_names import PUBLIC
from tests.site import build, have_class, page, text_of

_WIDEST_SIGNATURE = 60  # in letters; a phone scrolls it, a desktop does not


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory)


def entries(site: Path) -> dict[str, ET.Element]:
    """Return the reference's functions and classes by name, each with its own description only."""
    found = {}
    for path in (site / "reference").rglob("index.html"):
        for entry in have_class(page(path), "doc-object"):
            heading = next((each for each in entry if "doc-heading" in each.get("class", "")), None)
            if heading is not None:
                found[heading.get("id", "")] = entry
    return found


def signature_of(entry: ET.Element) -> ET.Element | None:
    return next((each for each in entry if "doc-signature" in each.get("class", "")), None)


def sections_of(entry: ET.Element) -> dict[str, ET.Element]:
    """Return the lists of an entry's own docstring, by their titles."""
    (contents,) = (each for each in entry if "doc-contents" in each.get("class", ""))
    children, found = list(contents), {}
    for title, section in itertools.pairwise(children):
        if have_class(title, "doc-section-title"):
            found[text_of(title).removesuffix(":")] = section
    return found


def without_layout(annotation: str) -> str:
    """Return a type as one word: a signature wraps a long one in parentheses and line breaks."""
    return re.sub(r"^\((.*)\)$", r"\1", re.sub(r"\s", "", annotation))


def test_each_signature_is_wrapped_and_highlighted(site: Path) -> None:
    seen = 0
    for name, entry in entries(site).items():
        signature = signature_of(entry)
        if signature is None:  # a class without arguments
            continue
        lines = "".join(signature.itertext()).splitlines()
        assert max(map(len, lines)) <= _WIDEST_SIGNATURE, f"{name}: {lines}"
        assert have_class(signature, "p"), f"{name}: nothing is highlighted"
        seen += 1
    assert seen > len(PUBLIC) / 2


def test_each_return_shows_its_type_and_a_description(site: Path) -> None:
    seen = 0
    for name, entry in entries(site).items():
        returned = sections_of(entry).get("Returns")
        if returned is None:
            continue
        (item,) = returned
        shown = [text_of(each) for each in item if each.tag == "code"]
        signature = signature_of(entry)
        assert signature is not None
        _, _, annotation = text_of(signature).rpartition("->")
        (description,) = have_class(item, "doc-md-description")
        assert list(map(without_layout, shown)) == [without_layout(annotation)], name
        assert text_of(description)
        seen += 1
    assert seen > len(PUBLIC) / 3


def test_the_index_links_every_public_name_to_its_entry(site: Path) -> None:
    index = site / "reference" / "index.html"
    rows = [list(row) for row in page(index).iter("tr")]
    links = {text_of(first): link.get("href", "") for first, *_ in rows for link in first.iter("a")}
    for name in PUBLIC:
        target, _, anchor = links[name].partition("#")
        there = page(index.parent / target / "index.html")
        assert any(each.get("id") == anchor for each in there.iter()), f"{name}: {target}#{anchor}"


def test_the_index_is_in_the_order_of_the_alphabet(site: Path) -> None:
    rows = [list(row) for row in page(site / "reference" / "index.html").iter("tr")]
    names = [text_of(row[0]) for row in rows]
    names = [name.rpartition(".")[2].lower() for name in names[names.index("name") + 1 :]]
    assert len(names) >= len(PUBLIC)
    assert names == sorted(names)


def test_the_reference_shows_nothing_private(site: Path) -> None:
    assert not [name for name in entries(site) if re.search(r"\._(?!_)", name)]


def test_a_power_is_not_bold_and_a_bar_in_a_table_has_no_backslash(site: Path) -> None:
    for path in site.rglob("index.html"):
        text = re.sub(r"<pre>.*?</pre>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        wrong = re.search(r".{,60}(\d<strong>|\\\|).{,60}", text)  # 2**31 needs backticks
        assert wrong is None, f"{path.relative_to(site)}: {wrong[0]}"


def test_compiled_python_files_are_not_published() -> None:
    """Python writes the hook's own compiled files next to the pages after a build has started."""
    loaded = load_config(str(Path(__file__).parents[1] / "mkdocs.yml"))
    assert loaded.exclude_docs is not None
    assert loaded.exclude_docs.match_file("__pycache__/names.cpython-311.pyc")
    assert not loaded.exclude_docs.match_file("errors.md")
