"""Work of several tests that is begun before they ask for it, where most of it is waiting."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import pytest

T = TypeVar("T")

# More of them make two cores late for what the tests promise.
_AT_A_TIME = 2


@contextmanager
def begun_ahead(
    request: pytest.FixtureRequest, jobs: Mapping[str, Callable[[], T]]
) -> Iterator[Callable[[str], T]]:
    """Begin the jobs of all tests that were chosen; gives what waits for a job and its result.

    Args:
        request: of a fixture.
        jobs: by the parameter's id in the tests' names.
    """
    chosen = {item.name.partition("[")[2].rstrip("]") for item in request.session.items}
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        begun = {name: pool.submit(job) for name, job in jobs.items() if name in chosen}
        yield lambda name: begun[name].result()
        pool.shutdown(cancel_futures=True)
