"""The mutants of ``python -m tests.mutants``, of which none is run here."""

from pathlib import Path

import pytest

from tests.mutants.mutant import Mutant
from tests.mutants.plan import MUTANTS
from tests.mutants.run import fits

_ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: str(mutant.name))
def test_every_mutant_applies_to_the_package_and_breaks_no_syntax(mutant: Mutant) -> None:
    """One that does not is never killed by what it stands for."""
    assert fits(_ROOT, mutant)
    source = (_ROOT / mutant.path).read_text(encoding="utf-8")
    compile(source.replace(mutant.old, mutant.new), mutant.path, "exec")
