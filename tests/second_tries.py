"""Retry a failed test that is marked ``timed`` once, alone, after all others.

Such a test checks a promised duration, and the machine may have been busy with the other tests. A
test that hangs or is wrong fails twice. More than `ALLOWED` retries fail the run: then the machine
is not the cause.
"""

import subprocess
import sys
from collections.abc import Generator

import pytest

ALLOWED = 3
_OPTION = "--is-second-try"
_LIMIT_S = 900.0


class SecondTries:
    """A pytest plugin; with several processes each has one."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}  # output of the first try, by the test's id

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Leave the outcome of a failed test open if it gets a second try."""
        report = yield
        if report.when == "call" and report.failed and item.get_closest_marker("timed"):
            report.outcome = "open"  # type: ignore[assignment]  # plugins may have their own
        return report

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Show the open outcome during the run."""
        return ("first try", "1", "FAILED ITS FIRST TRY") if _is_open(report) else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record which tests get a second try; with several processes, the first one does."""
        if _is_open(report):
            self._first[report.nodeid] = report.longreprtext

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        """Run the second tries after all tests."""
        result = yield
        if not hasattr(session.config, "workerinput"):
            for name in self._first:
                second = _again(name, session.config)
                session.config.hook.pytest_runtest_logreport(report=second)
            session.testsfailed += len(self._first) > ALLOWED
        return result

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Report the second tries and their reasons."""
        for name, text in self._first.items():
            terminalreporter.section(f"first try of {name}", sep="_")
            terminalreporter.write_line(text)
        count = len(self._first)
        verdict = ": too many for a busy machine to be the reason" if count > ALLOWED else ""
        terminalreporter.write_line(f"second tries: {count} of at most {ALLOWED}{verdict}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that marks a second try, so that there is no third."""
    parser.addoption(_OPTION, action="store_true", help="a timed test that fails has failed")


def pytest_configure(config: pytest.Config) -> None:
    """Give each timed test of this run a second try."""
    if not config.getoption(_OPTION):
        config.pluginmanager.register(SecondTries())


def _is_open(report: pytest.TestReport) -> bool:
    return str(report.outcome) == "open"


def _again(name: str, config: pytest.Config) -> pytest.TestReport:
    """Run one test in a separate pytest."""
    settings = [] if config.inipath is None else ["-c", str(config.inipath)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *settings]
    try:
        done = subprocess.run(
            [*command, _OPTION, name],
            cwd=config.rootpath,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
            check=False,
        )
        has_passed, printed = done.returncode == 0, done.stdout
    except subprocess.TimeoutExpired as expired:
        has_passed, printed = False, f"{expired}\n{expired.stdout!r}"
    return pytest.TestReport(
        nodeid=name,
        location=(name.partition("::")[0], None, name.partition("::")[2]),
        keywords={},
        outcome="passed" if has_passed else "failed",
        longrepr=None if has_passed else f"second try:\n{printed}",
        when="call",
    )
