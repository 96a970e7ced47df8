"""Fixtures for the whole suite."""

from collections.abc import Iterator

import pytest

from tests.workers import EXPLAINED

pytest.register_assert_rewrite(*EXPLAINED)

from tests.ranks import close_pools  # noqa: E402  # what it imports is to be rewritten


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
