"""Fixtures for the whole suite."""

import faulthandler
import os
from collections.abc import Iterator

import pytest

from tests.workers import EXPLAINED

pytest.register_assert_rewrite(*EXPLAINED)

from tests.ranks import close_pools  # noqa: E402  # what it imports is to be rewritten

# Tests on ranks have deadlines of their own; this one is for a hang of pytest's own process.
_DEADLINE_S = 400.0
_STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Keep the real stderr, which each test finds captured."""
    config.stash[_STDERR] = os.dup(2)


@pytest.fixture(autouse=True)
def _deadline(pytestconfig: pytest.Config) -> Iterator[None]:
    """End the run with all stacks rather than let one test hang it."""
    faulthandler.dump_traceback_later(_DEADLINE_S, exit=True, file=pytestconfig.stash[_STDERR])
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(params=["pickle", "msgpack"])
def codec(request: pytest.FixtureRequest) -> str:
    """The name of each codec in turn."""
    return str(request.param)


@pytest.fixture(autouse=True, scope="session")
def _pools_end_when_asked() -> Iterator[None]:
    """After all tests every worker must end by itself: no thread or socket may hold it."""
    yield
    stubborn = close_pools()
    assert not stubborn, f"had to be killed: {', '.join(stubborn)}"
