"""Ranks on this machine, started from a program, a notebook or a test, by torch's own launcher.

Knows processes and their files; what runs inside of one is ``worker``.
"""

import contextlib
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple, cast

import torch.distributed as dist

from objcomm._config import Timeout, seconds_of
from objcomm._transport.store import loopback_store
from objcomm._wire.failure_message import failure_of
from objcomm.errors import LaunchError, RankFailure, UsageError, text_of

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# After one rank has failed the others hear of it by themselves within 2 s, and tell what they saw.
_GRACE_SECONDS = 4.0
# A busy machine takes a while to end a killed process; torch leaves it alone after the grace.
_KILLED_SECONDS = 60.0
_POLL_SECONDS = 0.05
_STACK_SECONDS = 4.0
_STACK_POLL_SECONDS = 0.25

# Of what torch says there, errors alone are news: that ranks are ended, the caller's error tells.
_CHATTER = logging.getLogger("torch.distributed.elastic.multiprocessing.api")

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

# A rank finds modules where its parent does, objcomm included.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from objcomm._bootstrap.worker import main; sys.exit(main())"
)


def launch(
    fn: Callable[[*Ts], T],
    nproc: int,
    *args: *Ts,
    joined: bool = True,
    backend: str | None = None,
    timeout: Timeout = None,
    environment: Mapping[str, str] | None = None,
) -> list[T]:
    """Run a function on several new ranks on this machine, and return what each returned.

    To be called by a program that is no rank itself: a script, a notebook or a test. Each rank is a
    fresh process, which has torchrun's variables. Functions of ``__main__`` and of notebooks,
    lambdas and closures go there by value, others by name. Ranks write to this program's output.
    Whatever happens, Ctrl-C and SIGTERM included, no rank outlives the call; if this process is
    killed, the kernel kills the ranks (on Linux).

    Args:
        fn: what to run; for keywords use ``functools.partial`` or a lambda.
        nproc: how many ranks.
        args: for ``fn``, the same on every rank.
        joined: whether each rank calls ``objcomm.init`` before ``fn``, and ``objcomm.shutdown``
            after it.
        backend: for ``objcomm.init``.
        timeout: seconds or timedelta for all, the start of the processes included; no limit if
            None. Ranks that have not ended by then are ended.
        environment: further variables for each rank. ``OMP_NUM_THREADS`` is this machine's cores
            divided by ``nproc`` if neither this nor the environment has it.

    Returns:
        What ``fn`` returned on each rank, in rank order.

    Raises:
        UsageError: an argument is wrong, or ``fn`` or ``args`` can't be pickled.
        LaunchError: a rank raised, exited or was ended. It has every such rank's failure with its
            traceback; a rank that waited in vain shows where it stood.

    Examples:
        >>> import objcomm
        >>> objcomm.launch(lambda base: base + objcomm.rank(), 2, 40)
        [40, 41]
    """
    if not callable(fn):
        raise UsageError(f"launch: fn={fn!r} must be a function")
    if type(nproc) is not int or nproc < 1:
        raise UsageError(
            f"launch: nproc={nproc!r} must be a number of ranks, an integer of at least 1"
        )
    _check_start(backend, environment)
    if not dist.is_available():
        raise UsageError("launch: this torch has no distributed")
    limit = float("inf") if timeout is None else seconds_of("launch", timeout)
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    order = _pickled(name, (fn, args, joined, backend))
    stopped = 0
    folders = tempfile.TemporaryDirectory(prefix="objcomm-launch-")
    with folders as folder, _handlers_kept(), _quiet():
        job = _Job(name, Path(folder), nproc, environment or {})
        try:
            job.run(order, limit)
            results = job.results()
        except BaseException as error:
            stopped = getattr(error, "sigval", 0)  # of torch's SignalException
            if not stopped:
                raise
    if stopped == signal.SIGINT:
        raise KeyboardInterrupt
    if stopped:  # now that the ranks have ended, it does what it would have done without them
        os.kill(os.getpid(), stopped)
    return cast("list[T]", results)


def _pickled(name: str, order: tuple[object, ...]) -> bytes:
    from objcomm._codecs.by_value import dumps  # noqa: PLC0415  # most programs launch nothing

    try:
        return dumps(order)
    except Exception as error:
        raise UsageError(
            f"launch: {name} or something it needs can't be sent to another process: "
            f"{text_of(error)}"
        ) from error


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Put the signals' handlers back that torch's launcher replaces, on the main thread only."""
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {each: signal.getsignal(each) for each in _SIGNALS} if is_main else {}
    try:
        yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    _CHATTER.addFilter(is_error)
    try:
        yield
    finally:
        _CHATTER.removeFilter(is_error)


def _check_start(backend: str | None, environment: Mapping[str, str] | None) -> None:
    """Raise UsageError, unless ranks can be started with these."""
    if not isinstance(backend, str | None):
        raise UsageError(f"launch: backend={backend!r} must be a backend's name or None")
    if not isinstance(environment, Mapping | None):
        raise UsageError(f"launch: environment={environment!r} must be a mapping of strings")
    for variable, value in (environment or {}).items():
        if not all(isinstance(text, str) for text in (variable, value)):
            raise UsageError(
                f"launch: environment={{{variable!r}: {value!r}}}; pass both as strings"
            )


class _Job:
    """The ranks of one call.

    Attributes:
        failed: why ranks had to be ended, by rank.
    """

    def __init__(self, name: str, folder: Path, nproc: int, environment: Mapping[str, str]) -> None:
        self._name = name
        self._folder = folder
        self._nproc = nproc
        self._environment = environment
        self._context: Any = None
        self.failed: dict[int, str] = {}

    def run(self, order: bytes, limit: float) -> None:
        """Start all ranks and return when none is left."""
        # Imported here, because it takes as long as all of objcomm, for programs that launch.
        from torch.distributed.elastic.multiprocessing import (  # noqa: PLC0415  # see above
            DefaultLogsSpecs,
            start_processes,
        )

        deadline = time.monotonic() + limit
        (self._folder / "order").write_bytes(order)
        # The ranks meet in this process, as they do in torchrun's: no port can be taken meanwhile.
        store = loopback_store()
        command = ("-c", _PROGRAM, json.dumps(sys.path), str(self._folder), str(os.getpid()))
        before = {each: signal.getsignal(each) for each in _SIGNALS}
        self._context = start_processes(
            "objcomm",
            sys.executable,
            dict.fromkeys(range(self._nproc), command),
            {rank: self._variables(rank, store.port) for rank in range(self._nproc)},
            DefaultLogsSpecs(log_dir=str(self._folder)),
        )
        try:
            _restore_chosen(before)
            self._wait(deadline, limit)
        finally:
            self._context.close(timeout=int(_GRACE_SECONDS))
            for process in self._processes().values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_KILLED_SECONDS)

    def _variables(self, rank: int, port: int) -> dict[str, str]:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores // self._nproc)))
        return {
            "OMP_NUM_THREADS": threads,
            **self._environment,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": str(self._nproc),
            "LOCAL_WORLD_SIZE": str(self._nproc),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": uuid.uuid5(uuid.NAMESPACE_OID, self._folder.name).hex,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def _wait(self, deadline: float, limit: float) -> None:
        """Return when all ranks have ended, or those that have not may not go on."""
        reason = f"it had not ended within {limit:g} s, and was killed"
        while running := self._running():
            if self._has_failed() and "failed" not in reason:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
                reason = f"it had not ended {_GRACE_SECONDS:g} s after another rank failed"
            if time.monotonic() > deadline:
                # Who has told how it went has only been slow to end.
                self._ask_for_stacks([rank for rank in running if not self._has_told(rank)])
                # Decided before they are ended: what one then hears of another's end is no news.
                late = [rank for rank in running if not self._has_told(rank)]
                self.failed = dict.fromkeys(late, reason)
                return
            time.sleep(_POLL_SECONDS)

    def _processes(self) -> dict[int, Any]:
        return {rank: each.proc for rank, each in self._context.subprocess_handlers.items()}

    def _running(self) -> list[int]:
        return [rank for rank, process in self._processes().items() if process.poll() is None]

    def _has_failed(self) -> bool:
        has_told = any(self._path("failure", rank).exists() for rank in range(self._nproc))
        return has_told or any(each.poll() for each in self._processes().values())

    def _has_told(self, rank: int) -> bool:
        return any(self._path(kind, rank).exists() for kind in ("result", "failure"))

    def _ask_for_stacks(self, ranks: list[int]) -> None:
        """Let ranks write where they stand, and return when they have, or soon if they can't."""
        paths = {rank: self._path("stacks", rank) for rank in ranks}
        asked = {rank: path for rank, path in paths.items() if path.exists()}  # so it listens
        for rank in asked:
            self._processes()[rank].send_signal(signal.SIGUSR1)
        expires = time.monotonic() + _STACK_SECONDS
        written = [0] * len(asked)
        while time.monotonic() < expires:
            time.sleep(_STACK_POLL_SECONDS)
            before, written = written, [path.stat().st_size for path in asked.values()]
            if all(written) and written == before:
                return

    def _path(self, kind: str, rank: int) -> Path:
        return self._folder / f"{kind}{rank}"

    def results(self) -> list[object]:
        """What all ranks returned.

        Raises:
            LaunchError: some did not return.
        """
        results: list[object] = []
        failures: dict[int, RankFailure] = {}
        for rank in range(self._nproc):
            try:
                results.append(self._result(rank))
            except _Failed as failed:
                failures[rank] = failed.failure
            except Exception as error:  # noqa: BLE001  # what a result's own code raises
                failures[rank] = failure_of(error, rank)
        if failures:
            in_order = sorted(failures, key=self._when)
            raise LaunchError(self._name, {rank: failures[rank] for rank in in_order})
        return results

    def _when(self, rank: int) -> tuple[int, int]:
        """A failure's place in the order of causes, then of time.

        What a rank heard of another comes after all that may have been its cause, whoever told
        first; what had to be ended comes last. A death, which nobody told, comes before what was.
        """
        path = self._path("failure", rank)
        if rank in self.failed:
            return 2, 0
        if not path.exists():
            return 0, 0
        is_heard, _ = json.loads(path.read_text(encoding="utf-8"))
        return int(is_heard), path.stat().st_mtime_ns

    def _result(self, rank: int) -> object:
        ended = self.failed.get(rank)
        if not ended and self._path("result", rank).exists():
            return pickle.loads(self._path("result", rank).read_bytes())  # noqa: S301  # our own rank's
        if not ended and self._path("failure", rank).exists():
            _, told = json.loads(self._path("failure", rank).read_text(encoding="utf-8"))
            raise _Failed(RankFailure(rank, *told))
        status = self._processes()[rank].returncode or 0
        how = f"ended by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        reason = ended or f"its process ended without a report: {how}"
        stacks = self._path("stacks", rank)
        text = stacks.read_text(errors="replace") if stacks.exists() else ""
        raise _Failed(RankFailure(rank, "ChildProcessError", reason, text))


class _Failed(Exception):
    """A rank did not return; it goes no further than this module."""

    def __init__(self, failure: RankFailure) -> None:
        super().__init__(failure)
        self.failure = failure


def _restore_chosen(before: Mapping[signal.Signals, Any]) -> None:
    """Put back handlers that the program has chosen; torch's stay for signals that end it."""
    if threading.current_thread() is threading.main_thread():
        for each, handler in before.items():
            if handler is not signal.SIG_DFL:
                signal.signal(each, handler)
