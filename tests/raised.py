"""The texts that objcomm raises, with gaps, and the page that explains them.

``python -m tests.raised`` writes the texts into ``docs/errors.md``. The page has an explanation for
each of them, or lists it between two comments, where one explanation is enough for many.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).parents[1]
_PACKAGE = _ROOT / "objcomm"
PAGE = _ROOT / "docs" / "errors.md"
_GAP = "…"  # varies from case to case, on the page and here
_SHOWING = ("Error", "Timeout", "Position")  # ends of the names of classes that show their text
_FEWEST_WORDS = 2  # shorter texts are names, such as a codec's
_SPAN = re.compile(r"`([^`\n]+)`")
_LIST = re.compile(r"(<!-- other texts of (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def words(text: str) -> list[str]:
    """Split a text into what a search uses: words and gaps, in lower case."""
    return re.findall(rf"\w+|{_GAP}", text.lower())


def template(node: ast.expr) -> str:
    """Return a text with a gap for each inserted value; empty if it is not a text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [each.value if isinstance(each, ast.Constant) else _GAP for each in node.values]
        return "".join(map(str, parts))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (template(node.left) or _GAP) + (template(node.right) or _GAP)
    return ""


def texts(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield each text that an error will show, after the name of the class that takes it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name.endswith(_SHOWING):
                yield from ((name, each) for each in node.args)
            yield from ((name, each.value) for each in node.keywords if each.arg == "reason")
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "reason":
            yield "", node.value
        elif isinstance(node, ast.ClassDef) and node.name.endswith(_SHOWING):
            parts = [each for each in ast.walk(node) if isinstance(each, ast.Return)]
            yield from (("", each.value) for each in parts if each.value is not None)


class RaisedText(NamedTuple):
    """A text of the package with gaps: its position, its class, and the whole text."""

    where: str
    of: str
    text: str

    @property
    def sentence(self) -> str:
        """Return the text up to the advice after a semicolon."""
        return self.text.split("; ")[0]


def raised() -> list[RaisedText]:
    """List the texts that the package raises."""
    found = []
    for path in sorted(_PACKAGE.rglob("*.py")):
        for of, node in texts(ast.parse(path.read_text(encoding="utf-8"))):
            each = RaisedText(f"{path.relative_to(_ROOT)}:{node.lineno}", of, template(node))
            fixed = [word for word in words(each.sentence) if word != _GAP]
            if len(fixed) >= _FEWEST_WORDS:
                found.append(each)
    return found


def is_in(text: str, message: list[str]) -> bool:
    """Return whether a message has the fixed words of a text, unbroken between its gaps."""
    at = 0
    for piece in " ".join(words(text)).split(_GAP):
        want = piece.split()
        starts = range(at, len(message) - len(want) + 1)
        begin = next((start for start in starts if message[start:][: len(want)] == want), None)
        if begin is None:
            return False
        at = begin + len(want)
    return True


def spans(page: str) -> list[list[str]]:
    """List what a page formats as code, each split into words."""
    return [words(span) for span in _SPAN.findall(page)]


def written(page: str) -> str:
    """Return the page of errors with the texts that the code has.

    A text that the page explains keeps its place, and is completed by the advice at its end. The
    lists get the texts of a class, or of a folder, that the page does not explain.
    """
    found = raised()
    known = {_key(each.sentence): _shown(each.text) for each in found}
    explained = spans(_LIST.sub("", page))

    def complete(match: re.Match[str]) -> str:
        span = match[1]
        return f"`{known.get(_key(span.split('; ')[0]), span)}`"

    def fill(match: re.Match[str]) -> str:
        texts = {
            _shown(each.text)
            for each in found
            if (each.of == match[2] or each.where.startswith(f"objcomm/{match[2]}"))
            and not any(is_in(each.sentence, span) for span in explained)
        }
        lines = [f"- `{text}`\n" for text in sorted(texts, key=words)]
        return "".join([match[1], "\n", *lines, "\n", match[3]])

    return _LIST.sub(fill, _SPAN.sub(complete, page))


def _shown(text: str) -> str:
    """Return a text as the page shows it: with one gap at a time, and a colon after a call."""
    return re.sub(rf"^{_GAP}(?=\w)", f"{_GAP}: ", re.sub(rf"{_GAP}(\s*{_GAP})+", _GAP, text))


def _key(text: str) -> tuple[str, ...]:
    return tuple(words(_shown(text)))


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
