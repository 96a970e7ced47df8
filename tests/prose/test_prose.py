"""The prose linter: each rule finds its bad sentence, and no rule finds a good one."""

import pytest

from tests.prose.__main__ import CONFIG, faults, python_prose

PAGE = """\
Read it at
once, not `at once`, [there](at once.md) or below.

```text
at once
```
"""
MODULE = '''\
"""Return at once.

Args:
    anew: a name, no prose.

Example:
    >>> "at once"
    'at once'
"""

at = once = "at once"  # At
# once.
names = {"anew": f"a {anew} b"}
raise ValueError(f"at {once} at "
                 f"once")
'''


@pytest.mark.parametrize("rule", CONFIG["rules"], ids=lambda rule: rule["bad"])
def test_a_rule_finds_its_bad_sentence_and_none_finds_its_good_one(rule: dict[str, str]) -> None:
    assert any(fault.endswith(f"write: {rule['write']}") for _, fault in faults(rule["bad"]))
    assert faults(rule["good"]) == []


def test_only_the_prose_of_a_page_is_read() -> None:
    assert [line for line, _ in faults(PAGE)] == [1]


@pytest.mark.parametrize(("with_strings", "lines"), [(False, [1, 11]), (True, [1, 11, 11, 14])])
def test_only_comments_and_strings_of_python_are_read(
    *, with_strings: bool, lines: list[int]
) -> None:
    text = python_prose(MODULE, with_strings=with_strings)
    assert [line for line, _ in faults(text)] == lines
