"""The check of promised durations can fail, and allows a busy machine more time."""

import os
import subprocess
import sys
import time

import pytest

from tests import waits
from tests.waits import Slowness, wait_until, within


def test_a_machine_with_others_to_serve_is_slower() -> None:
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(processors)})  # child processes stay there
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        with Slowness() as slowness:
            time.sleep(1)
    finally:
        os.sched_setaffinity(0, processors)
        for process in busy:
            process.kill()
            process.wait()
    assert slowness.factor > 1.2


def test_a_short_block_is_measured_over_one_full_turn() -> None:
    """No turn is faster than it should be; part of one would make a busy machine look fast."""
    beside = [sys.executable, "-I", "-S", "-c", waits._BESIDE]  # noqa: SLF001  # a factor is never below 1
    done = subprocess.run(beside, input="", capture_output=True, text=True, check=True)
    assert float(done.stdout) >= 1.0


@pytest.mark.parametrize(("factor", "is_kept"), [(1.0, False), (1000.0, True)])
def test_a_block_that_takes_longer_than_promised_fails_unless_the_machine_is_slow(
    monkeypatch: pytest.MonkeyPatch, factor: float, *, is_kept: bool
) -> None:
    class Known(Slowness):
        def __exit__(self, *raised: object) -> None:
            super().__exit__(*raised)
            self.factor = factor

    monkeypatch.setattr(waits, "Slowness", Known)
    caught = None
    try:
        with within(0.01):
            time.sleep(0.02)
    except AssertionError as error:
        caught = str(error)
    assert is_kept == (caught is None)
    assert is_kept or "0.01 s were promised" in str(caught)


def test_an_event_that_never_happens_is_named() -> None:
    with pytest.raises(AssertionError, match=r"waited 0\.05 s in vain for rain"):
        wait_until(lambda: False, "rain", patience_s=0.05)
