"""Every text that objcomm raises is on the page of errors, where a search finds it."""

import ast
import re
from pathlib import Path

import pytest

from tests.error_samples import EXAMPLES
from tests.raised import is_in, raised, template, texts, words

_ROOT = Path(__file__).parents[1]
_PAGE = _ROOT / "docs" / "errors.md"


def documented() -> list[list[str]]:
    """Return the messages of the page, each split into words."""
    page = _PAGE.read_text(encoding="utf-8")
    return [words(span) for span in re.findall(r"`([^`\n]+)`", page)]


def test_the_page_has_every_text_that_is_raised() -> None:
    messages, told = documented(), raised()
    missing = [
        f"{each.where}: {each.sentence}"
        for each in told
        if not any(is_in(each.sentence, message) for message in messages)
    ]
    assert told
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("cls", sorted(EXAMPLES, key=str))
def test_the_page_has_a_heading_for_every_error(cls: type[BaseException]) -> None:
    page = _PAGE.read_text(encoding="utf-8")
    is_base = cls.__name__ in {"ObjcommError", "CodecError"}  # never raised itself
    assert is_base or re.search(rf"^### {cls.__name__}\b", page, re.MULTILINE)


def test_the_check_sees_what_is_missing() -> None:
    tree = ast.parse('raise UsageError(f"{name}: give a {kind}, not a {other}; mend it")')
    ((of, node),) = texts(tree)
    found = template(node)
    assert of == "UsageError"
    assert found == "…: give a …, not a …; mend it"
    assert is_in(found, words("…: give a list, not a …; mend it"))
    assert not is_in(found, words("…: give a list, or a …; mend it"))
    assert not is_in("not a …, but a …", words("… but a …, not a …"))
