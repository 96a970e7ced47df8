"""The site as a reader gets it: built once per test run, and parsed into a tree."""

import os
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.once import once

__all__ = ["build", "have_class", "page", "text_of"]

_ROOT = Path(__file__).parents[1]
_WITHOUT_END = {"area", "br", "col", "hr", "img", "input", "link", "meta", "path", "source", "wbr"}


def build(factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the site; the first process of a run that asks builds it for all."""
    return once(factory, "site", _built)


def _built(folder: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)],
        cwd=_ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


class _Reader(HTMLParser):
    """Build a tree from a page; an unclosed tag ends with its parent."""

    def __init__(self) -> None:
        super().__init__()
        self.builder = ET.TreeBuilder()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.builder.start(tag, {name: value or "" for name, value in attrs})
        if tag in _WITHOUT_END:
            self.builder.end(tag)
        else:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            while (ended := self.open.pop()) != tag:
                self.builder.end(ended)
            self.builder.end(tag)

    def handle_data(self, data: str) -> None:
        if self.open:
            self.builder.data(data)


@cache
def page(path: Path) -> ET.Element:
    """Parse a page into a tree."""
    reader = _Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    return reader.builder.close()


def have_class(tree: ET.Element, name: str) -> list[ET.Element]:
    """List the elements of a tree that have this class."""
    return [each for each in tree.iter() if name in each.get("class", "").split()]


def text_of(tree: ET.Element) -> str:
    """Return the text that a reader sees, with each gap as one space."""
    return " ".join("".join(tree.itertext()).split())
