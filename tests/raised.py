"""The texts that objcomm raises, with gaps, and whether a message contains one."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).parents[1]
_PACKAGE = _ROOT / "objcomm"
_GAP = "…"  # varies from case to case, on the page and here
_TOLD = ("Error", "Timeout", "Position")  # classes whose text a user reads
_FEWEST_WORDS = 2  # shorter texts are names, such as a codec's


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
            if name.endswith(_TOLD):
                yield from ((name, each) for each in node.args)
            yield from ((name, each.value) for each in node.keywords if each.arg == "reason")
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "reason":
            yield "", node.value
        elif isinstance(node, ast.ClassDef) and node.name.endswith(_TOLD):
            parts = [each for each in ast.walk(node) if isinstance(each, ast.Return)]
            yield from (("", each.value) for each in parts if each.value is not None)


class Told(NamedTuple):
    """A text of the package with gaps: its position, its class, and the whole text."""

    where: str
    of: str
    text: str

    @property
    def sentence(self) -> str:
        """Return the text up to the advice after a semicolon."""
        return self.text.split("; ")[0]


def raised() -> list[Told]:
    """List the texts that the package raises."""
    found = []
    for path in sorted(_PACKAGE.rglob("*.py")):
        for of, node in texts(ast.parse(path.read_text(encoding="utf-8"))):
            told = Told(f"{path.relative_to(_ROOT)}:{node.lineno}", of, template(node))
            fixed = [word for word in words(told.sentence) if word != _GAP]
            if len(fixed) >= _FEWEST_WORDS:
                found.append(told)
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
