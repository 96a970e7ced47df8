"""Write the alphabetical index of the reference, from its own pages, as MkDocs builds the site.

MkDocs calls ``on_page_markdown``, since ``mkdocs.yml`` names this file under ``hooks``. A name is
written once, on the page that shows it: as ``::: objcomm.name``, or as ``[](){#objcomm.name}``
where a line of that page says what it is another name of.
"""

import re
from pathlib import Path
from typing import Any

import griffe

_ROOT = Path(__file__).parents[1]
_INDEX = "reference/index.md"
_HERE = "<!-- every name -->"
_ENTRY = re.compile(r"^::: (\S+)|\[\]\(\)\{#(\S+)\}", re.MULTILINE)


def names(folder: Path) -> list[str]:
    """Each name that the pages of the reference show, by its last part."""
    pages = [page.read_text(encoding="utf-8") for page in folder.glob("*.md")]
    found = [shown or other for text in pages for shown, other in _ENTRY.findall(text)]
    return sorted(found, key=lambda name: (name.rpartition(".")[2].lower(), name))


def first_line(package: griffe.Object | griffe.Alias, name: str) -> str:
    """What a name's docstring says first."""
    member = package[name.partition(".")[2]]
    if member.docstring is None:
        return f"Another name of `{member.value}`."
    return member.docstring.value.partition("\n")[0].replace("|", r"\|")


def index(folder: Path) -> str:
    """A row for each name, with a link to where it is described."""
    package = griffe.load("objcomm", search_paths=[_ROOT], resolve_aliases=True)
    rows = ["| name | what it is |", "|---|---|"]
    for name in names(folder):
        shown = name.partition(".")[2]
        rows.append(f"| [`{shown}`][{name}] | {first_line(package, name)} |")
    return "\n".join(rows)


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """Put the index where its page asks for it."""
    if page.file.src_uri != _INDEX:
        return markdown
    if _HERE not in markdown:
        raise ValueError(f"{_INDEX} has no line {_HERE}, where the index of names goes")
    return markdown.replace(_HERE, index(Path(page.file.abs_src_path).parent))
