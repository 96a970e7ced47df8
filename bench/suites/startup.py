"""What importing the package costs."""

from collections.abc import Callable
from typing import Any

from bench.case import Target, case
from bench.peers import Peer


@case(
    "import",
    peers=("torch", "objcomm", "torch, then objcomm"),
    worlds=(1,),
    measure="import",
    samples=9,
    targets=(
        Target(
            0.050,
            against=1,
            unit="s",
            metric="import_seconds",
            world=1,
            why_missed="All of objcomm, on a machine where torch took 1.6 s in the same run.",
        ),
    ),
)
def startup(_peer: Peer, _mine: Any) -> Callable[[], object]:
    """Import in fresh interpreters, which have no peers: ``bench.startup`` does it."""
    raise NotImplementedError
