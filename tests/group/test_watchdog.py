"""The watchdog keeps running whatever happens to it: without it, no wait would end."""

import logging
import os
import resource
from unittest import mock

import objcomm
from objcomm import TransportTimeout
from objcomm._failures import watchdog
from objcomm._failures.watchdog import Watchdog
from tests.group.helpers import assert_group_works, error_in, tell_all
from tests.group.logs import collected
from tests.ranks import ranks
from tests.waits import wait_until
from tests.workers import here


@ranks(2, disposable=True)
def test_waits_are_watched_beyond_1024_open_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    objcomm.barrier()
    if here().rank == 0:
        error_in(TransportTimeout, lambda: objcomm.recv(1, timeout=0.1))
    tell_all("rank 0 has raised", "")
    for each in files:
        os.close(each)


@ranks(2, disposable=True)
def test_no_error_ends_the_watchdog() -> None:
    objcomm.barrier()
    if here().rank == 0:
        with (
            collected(logging.WARNING) as found,
            mock.patch.object(watchdog, "loss_in", side_effect=LookupError("of the test")),
        ):
            error_in(TransportTimeout, lambda: objcomm.recv(1, timeout=1))
        assert any("a process has ended" in text for text in found.told), found.told
    tell_all("rank 0 has raised", "")


@ranks(2, disposable=True)
def test_a_watchdog_whose_thread_has_ended_is_replaced_by_the_next_call() -> None:
    objcomm.barrier()
    before = watchdog._watchdogs.watchdog()  # noqa: SLF001  # there is no public way
    with mock.patch.object(Watchdog, "_tick", side_effect=SystemExit):
        wait_until(lambda: not before.is_alive(), "the watchdog's end")
    if here().rank == 0:
        error_in(TransportTimeout, lambda: objcomm.recv(1, timeout=0.1))
    tell_all("rank 0 has raised", "")
    assert watchdog._watchdogs.watchdog() is not before  # noqa: SLF001  # likewise
    assert_group_works()
