"""Fixtures for the whole suite."""

import faulthandler
import os
from collections.abc import Iterator
from operator import itemgetter
from types import CodeType

import cloudpickle
import hypothesis
import pytest

# torch's TCPStore resolves the name of each client that connects. A resolver that loses the query
# takes 5 s each time; this makes it 1 s. Child processes inherit it.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

from objcomm._transport.store import loopback_store
from tests import EXPLAINED

pytest_plugins = ["tests.second_tries"]

# By default an example that takes 200 ms fails; here time decides nothing. The examples are the
# same in each run; ``tests.fuzz`` looks for new ones.
hypothesis.settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    max_examples=100,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("suite")

pytest.register_assert_rewrite(*EXPLAINED)

from tests.leftovers import OPTION, VARIABLE, Leftovers  # noqa: E402  # the same
from tests.ranks import close_pools  # noqa: E402  # pytest is to rewrite what it imports

# Tests on ranks have their own deadlines; this one is for a hang of pytest's own process.
_DEADLINE_S = 1800.0
_STDERR = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that reports what tests leave behind."""
    parser.addoption(OPTION, action="store_true", help="fail tests that leave something behind")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the real stderr, because each test sees a captured one."""
    config.stash[_STDERR] = os.dup(2)
    if config.getoption(OPTION):
        os.environ[VARIABLE] = "1"
        loopback_store()  # the first store of torch in a process leaves a pipe open


@pytest.hookimpl(trylast=True)  # after deselected tests are gone
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the longest tests, and spread the faults, whose ranks wait more than they compute.

    A random order keeps the tests of a module together, and the faults would leave the processors
    idle for a minute. Each process starts with an equal part of the list, so the longest tests are
    placed where these parts begin. Otherwise the order is unchanged.
    """
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    lasting = [item for item in items if item.get_closest_marker("lasting")]
    begun = [(number % processes / processes, item) for number, item in enumerate(lasting)]
    others = [item for item in items if item not in set(lasting)]
    is_fault = [item.path.parent.name == "faults" for item in others]
    for chosen in (True, False):
        some = [item for item, is_one in zip(others, is_fault, strict=True) if is_one is chosen]
        begun += [((index + 0.5) / len(some), item) for index, item in enumerate(some)]
    items[:] = [item for _, item in sorted(begun, key=itemgetter(0))]


@pytest.fixture(autouse=True)
def _deadline(pytestconfig: pytest.Config) -> Iterator[None]:
    """End the run with all stacks rather than let one test hang it."""
    faulthandler.dump_traceback_later(_DEADLINE_S, exit=True, file=pytestconfig.stash[_STDERR])
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """With ``--leftovers``, fail a test that leaves something in pytest's own process.

    Leftovers on ranks are checked there; here the test may have started a pool.
    """
    is_here = not hasattr(request.function, "body")
    before = Leftovers() if is_here and request.config.getoption(OPTION) else None
    yield
    if before:
        request.node.funcargs.clear()  # fixture values hold what is torn down before this
    found = before.find() if before else []
    assert not found, "this was left:\n" + "\n".join(found)


@pytest.fixture(params=["pickle", "msgpack"])
def codec(request: pytest.FixtureRequest) -> str:
    """Return the name of each codec, one after the other."""
    return str(request.param)


@pytest.fixture
def constant_file_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name files as cloudpickle does since 3.1.3, whichever version is installed."""
    rules = cloudpickle.Pickler.dispatch_table.maps[0]
    parts_of = rules[CodeType]

    def reduce_code(code: CodeType) -> object:
        return parts_of(code.replace(co_filename="<dynamic-code>"))

    monkeypatch.setitem(rules, CodeType, reduce_code)


@pytest.fixture(autouse=True, scope="session")
def _pools_end_when_asked() -> Iterator[None]:
    """Check after all tests that every worker exits when asked: no thread or socket blocks it."""
    yield
    stubborn = close_pools()
    assert not stubborn, f"had to be killed: {', '.join(stubborn)}"
