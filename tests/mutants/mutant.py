"""What a mutant is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """The package with one defect.

    Attributes:
        name: what to call it on the command line.
        path: the changed file, from the root of the checkout.
        old: a text that stands in that file exactly once.
        new: what takes its place.
        breaks: what is wrong then.
        tests: the files of tests that see it, the quickest first.
    """

    name: str
    path: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]
