"""Objects of a user's own, merged in rank order."""

from collections.abc import Callable
from typing import Any

from bench.case import Target, case
from bench.payloads import Tally
from bench.peers import Peer


@case("small custom object", targets=(Target(0.25, against="torch"),))
def all_reduce(peer: Peer, mine: Any) -> Callable[[], object]:
    """Merge every rank's object; torch gathers all of them and folds."""
    return lambda: peer.all_reduce(mine, Tally.merge)
