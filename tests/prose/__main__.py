"""``python -m tests.prose``: report the phrases of rules.toml in the prose of its files."""

import re
import sys
import tokenize
import tomllib
from io import StringIO
from itertools import accumulate
from pathlib import Path

_ROOT = Path(__file__).parents[2]
CONFIG = tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))
# A string after one of these is a docstring. From Python 3.12 on an f-string is several tokens.
_STATEMENT = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
_STRING = {number for number, name in tokenize.tok_name.items() if "STRING" in name}
_MARKS = re.compile(r"""^[a-zA-Z]*("{3}|'{3}|"|')|("{3}|'{3}|"|')$|^#:?""")
_CODE = re.compile(  # blocks, doctests with their output, `code`, addresses, fields, arguments
    r"(?sm)^ *(```+).*?^ *\1|>>> .*?(?=\n\s*\n|\Z)|(`+)[^`\n]*\n?[^`\n]*\2"
    r"|\]\([^)]*\)|\{[^{}\n]*\}|^ +\w+:"
)


def python_prose(source: str, *, with_strings: bool) -> str:
    """Blank out all but comments, docstrings and, if requested, other strings of several words."""
    starts = [0, *accumulate(len(line) + 1 for line in source.split("\n"))]
    text, before = list(re.sub(r"\S", "·", source)), tokenize.NEWLINE
    for token in tokenize.generate_tokens(StringIO(source).readline):
        is_prose = with_strings and (" " in token.string or before in _STRING)
        is_string = token.type in _STRING and (is_prose or before in _STATEMENT)
        if is_string or token.type == tokenize.COMMENT:
            begin, end = (starts[row - 1] + column for row, column in (token.start, token.end))
            text[begin:end] = _MARKS.sub(lambda mark: " " * len(mark[0]), source[begin:end])
        if token.type not in {tokenize.NL, tokenize.COMMENT}:
            before = token.type
    return "".join(text)


def faults(text: str) -> list[tuple[int, str]]:
    """List the line of each phrase found, and the phrase with its replacement."""
    text = _CODE.sub(lambda code: re.sub(r"\S", "·", code[0]), text)
    text = re.sub(r"·[· ]*·", "·", text)  # most of a module is code: less to search
    found = []
    for rule in CONFIG["rules"]:
        phrase = rule["phrase"].replace(" ", r"(?: +| *\n *)")
        for each in re.finditer(rf"(?<!\w)(?:{phrase})(?!\w)", text, re.IGNORECASE):
            fault = f'"{" ".join(each[0].split())}" — write: {rule["write"]}'
            found.append((text.count("\n", 0, each.start()) + 1, fault))
    return sorted(found)


if __name__ == "__main__":
    reports = []
    paths = {path for pattern in CONFIG["files"] for path in _ROOT.glob(pattern)}
    for path in sorted(paths - {_ROOT / name for name in CONFIG["generated"]}):
        name, text = path.relative_to(_ROOT), path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            text = python_prose(text, with_strings=name.parts[0] == "objcomm")
        reports += [f"{name}:{line}: {fault}" for line, fault in faults(text)]
    sys.exit("\n".join(reports) or None)
