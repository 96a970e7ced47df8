"""Every text that objcomm raises is on the page of errors, where a search finds it."""

import ast
import re

import pytest

from tests.error_samples import EXAMPLES
from tests.raised import PAGE, is_in, raised, spans, template, texts, words, written

_PAGE = PAGE.read_text(encoding="utf-8")

# Headings with texts that are logged, or composed from several literals.
_NOT_RAISED = (
    "its process ended without a report: …",
    "…; calls were made in a group of ranks …, without this rank",
    "…; store: no answer",
    "…; rank …: no answer for … s",
    "codec … cannot decode what",
    "codec … cannot decode …: ModuleNotFoundError",
    "codec … cannot decode …: AttributeError: …; rank … has … in the module …",
    "codec … cannot decode …, at …, made by …",
    "… leaves of … bytes are announced, more than the limit of …",
    "this rank's last calls: …",
    "objcomm could not write this rank's last calls: …",
    "--trace …",
    "could not end an expired wait",
    "… was started here but never waited for",
    "Running … on global rank … which does not belong to the given group.",
    "MASTER_ADDR=… does not lead to rank 0's store on its own host",
)


def test_the_page_is_written_from_the_texts_of_the_code() -> None:
    assert written(_PAGE) == _PAGE, "run: python -m tests.raised"


def test_a_text_is_completed_and_a_list_is_filled() -> None:
    page = """
`…: group=… must be a process group, a device mesh or None`
<!-- other texts of AuthenticationError -->
- `a message that no code has`
<!-- end -->
`the content of … is not what was signed`
"""
    new = written(page)
    assert "mesh or None; use objcomm.new_group to make a group from a list of ranks`" in new
    assert "- `… did not address this to a single rank`\n" in new
    assert "no code has" not in new
    assert new.count("is not what was signed") == 1
    assert written(new) == new


def test_a_heading_has_a_text_of_the_code() -> None:
    known = [*(each.sentence for each in raised()), *_NOT_RAISED]
    headings = re.findall(r"^#### (`.*`)$", _PAGE, re.MULTILINE)
    stale = [
        heading
        for heading in headings
        if not any(is_in(text, span) for span in spans(heading) for text in known)
    ]
    assert headings
    assert not stale


def test_the_page_has_every_text_that_is_raised() -> None:
    messages, found = spans(_PAGE), raised()
    missing = [
        f"{each.where}: {each.sentence}"
        for each in found
        if not any(is_in(each.sentence, message) for message in messages)
    ]
    assert found
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("cls", sorted(EXAMPLES, key=str))
def test_the_page_has_a_heading_for_every_error(cls: type[BaseException]) -> None:
    is_base = cls.__name__ in {"ObjcommError", "CodecError"}  # never raised itself
    assert is_base or re.search(rf"^### {cls.__name__}\b", _PAGE, re.MULTILINE)


def test_the_check_finds_missing_texts() -> None:
    tree = ast.parse('raise UsageError(f"{name}: give a {kind}, not a {other}; fix it")')
    ((of, node),) = texts(tree)
    found = template(node)
    assert of == "UsageError"
    assert found == "…: give a …, not a …; fix it"
    assert is_in(found, words("…: give a list, not a …; fix it"))
    assert not is_in(found, words("…: give a list, or a …; fix it"))
    assert not is_in("not a …, but a …", words("… but a …, not a …"))
