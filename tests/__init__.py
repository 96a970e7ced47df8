"""objcomm's tests; `python -m pytest` runs them all."""

#: Modules besides ``test_*`` whose asserts show their values.
EXPLAINED = (
    "tests.same",
    "tests.contracts",
    "tests.group.control",
    "tests.group.helpers",
    "tests.group.in_flight",
    "tests.group.pairs",
)
