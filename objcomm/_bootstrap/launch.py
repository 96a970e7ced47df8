"""Start ranks on this machine from a program, a notebook or a test, with torch's own launcher.

Knows processes and their files; ``worker`` runs inside each process.
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

# After one rank has failed, the others detect that within 2 s and report their own errors.
_GRACE_SECONDS = 4.0
# On a busy machine a killed process takes a while to end; torch stops waiting for it earlier.
_KILLED_SECONDS = 60.0
_POLL_SECONDS = 0.05
_STACK_SECONDS = 4.0
_STACK_POLL_SECONDS = 0.25

# Only errors of this logger are shown: the caller's own error says which ranks were ended.
_CHATTER = logging.getLogger("torch.distributed.elastic.multiprocessing.api")

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

# A rank finds modules where its parent finds them, objcomm included.
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
    """Run a function on several new ranks on this machine, and return all results.

    Call this from a program that is not a rank itself: a script, a notebook or a test. Each rank is
    a new process with torchrun's variables. Functions of ``__main__`` and of notebooks, lambdas and
    closures are sent by value, others by name. Ranks write to this program's output. No rank
    outlives the call, even after Ctrl-C or SIGTERM; if this process is killed, the kernel kills the
    ranks (on Linux).

    Args:
        fn: the function to run; use ``functools.partial`` or a lambda to pass keywords.
        nproc: number of ranks.
        args: arguments for ``fn``, the same on every rank.
        joined: whether each rank calls ``objcomm.init`` before ``fn``, and ``objcomm.shutdown``
            after it.
        backend: for ``objcomm.init``.
        timeout: seconds or timedelta for everything, including the start of the processes; no limit
            by default. Ranks still running at that time are ended.
        environment: additional variables for each rank. If neither this nor the environment sets
            ``OMP_NUM_THREADS``, it is the number of this machine's cores divided by ``nproc``.

    Returns:
        What ``fn`` returned on each rank, in rank order.

    Raises:
        UsageError: an argument is wrong, or ``fn`` or ``args`` can't be pickled.
        LaunchError: a rank raised, exited or was ended. It contains the failure of every such rank
            with its traceback; for a rank that hung, the traceback shows where.

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
    with folders as folder, _undisturbed() as handlers:
        job = _Job(name, Path(folder), nproc, environment or {})
        try:
            job.run(order, limit, handlers)
            results = job.results()
        except BaseException as error:
            stopped = getattr(error, "sigval", 0)  # if it is torch's SignalException
            if not stopped:
                raise
    if stopped == signal.SIGINT:
        raise KeyboardInterrupt
    if stopped:  # the ranks have ended, so the signal may take its normal effect
        os.kill(os.getpid(), stopped)
    return cast("list[T]", results)


def _pickled(name: str, order: tuple[object, ...]) -> bytes:
    from objcomm._codecs.by_value import dumps  # noqa: PLC0415  # most programs do not launch

    try:
        return dumps(order)
    except Exception as error:
        raise UsageError(
            f"launch: {name} or something it needs can't be sent to another process: "
            f"{text_of(error)}"
        ) from error


@contextlib.contextmanager
def _undisturbed() -> Iterator[dict[signal.Signals, Any]]:
    """Show only errors of torch's launcher, and restore the signal handlers that it replaces.

    Yields the handlers; none outside the main thread, where torch replaces none.
    """
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {each: signal.getsignal(each) for each in _SIGNALS} if is_main else {}

    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    _CHATTER.addFilter(is_error)
    try:
        yield handlers
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
        _CHATTER.removeFilter(is_error)


def _check_start(backend: str | None, environment: Mapping[str, str] | None) -> None:
    """Validate the backend and environment for new ranks.

    Raises:
        UsageError: one of them has the wrong type.
    """
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
        failed: for each rank that had to be ended, the reason.
    """

    def __init__(self, name: str, folder: Path, nproc: int, environment: Mapping[str, str]) -> None:
        self._name = name
        self._folder = folder
        self._nproc = nproc
        self._environment = environment
        self._context: Any = None
        self.failed: dict[int, str] = {}

    def run(self, order: bytes, limit: float, handlers: Mapping[signal.Signals, Any]) -> None:
        """Start all ranks, and return when all have ended.

        Args:
            order: what each rank runs.
            limit: how many seconds all ranks may take.
            handlers: the program's signal handlers; empty outside the main thread.
        """
        # Imported here because it takes as long as all of objcomm, and only launching needs it.
        from torch.distributed.elastic.multiprocessing import (  # noqa: PLC0415  # see above
            DefaultLogsSpecs,
            start_processes,
        )

        deadline = time.monotonic() + limit
        (self._folder / "order").write_bytes(order)
        # The ranks meet in this process, as in torchrun's, so the port can't be taken meanwhile.
        store = loopback_store()
        command = ("-c", _PROGRAM, json.dumps(sys.path), str(self._folder), str(os.getpid()))
        self._context = start_processes(
            "objcomm",
            sys.executable,
            dict.fromkeys(range(self._nproc), command),
            {rank: self._variables(rank, store.port) for rank in range(self._nproc)},
            DefaultLogsSpecs(log_dir=str(self._folder)),
        )
        try:
            for each, handler in handlers.items():
                if handler is not signal.SIG_DFL:  # torch's stays: the default would end us
                    signal.signal(each, handler)
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
        """Wait until all ranks have ended, or until those still running must be ended."""
        reason = f"it had not ended within {limit:g} s, and was killed"
        while running := self._running():
            if self._has_failed() and "failed" not in reason:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
                reason = f"it had not ended {_GRACE_SECONDS:g} s after another rank failed"
            if time.monotonic() > deadline:
                # A rank that has reported its outcome is only slow to end.
                self._ask_for_stacks([rank for rank in running if not self._has_reported(rank)])
                # Decided before they are ended: the end of one makes others fail, too.
                late = [rank for rank in running if not self._has_reported(rank)]
                self.failed = dict.fromkeys(late, reason)
                return
            time.sleep(_POLL_SECONDS)

    def _processes(self) -> dict[int, Any]:
        return {rank: each.proc for rank, each in self._context.subprocess_handlers.items()}

    def _running(self) -> list[int]:
        return [rank for rank, process in self._processes().items() if process.poll() is None]

    def _has_failed(self) -> bool:
        has_reported = any(self._path("failure", rank).exists() for rank in range(self._nproc))
        return has_reported or any(each.poll() for each in self._processes().values())

    def _has_reported(self, rank: int) -> bool:
        return any(self._path(kind, rank).exists() for kind in ("result", "failure"))

    def _ask_for_stacks(self, ranks: list[int]) -> None:
        """Make ranks write their stacks, and wait up to ``_STACK_SECONDS`` for them."""
        paths = {rank: self._path("stacks", rank) for rank in ranks}
        # The file exists once the rank handles the signal.
        asked = {rank: path for rank, path in paths.items() if path.exists()}
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
        """Return the results of all ranks.

        Raises:
            LaunchError: some ranks did not return.
        """
        results: list[object] = []
        failures: dict[int, RankFailure] = {}
        for rank in range(self._nproc):
            try:
                failure = self._failure(rank)
                if failure is None:
                    path = self._path("result", rank)
                    results.append(pickle.loads(path.read_bytes()))  # noqa: S301  # our own rank's
            except Exception as error:  # noqa: BLE001  # raised by code of the result itself
                failure = failure_of(error, rank)
            if failure is not None:
                failures[rank] = failure
        if failures:
            in_order = sorted(failures, key=self._when)
            raise LaunchError(self._name, {rank: failures[rank] for rank in in_order})
        return results

    def _when(self, rank: int) -> tuple[int, int]:
        """Return the sort key of a failure: by cause, then by time.

        A rank that died without a report comes first. Errors that a rank received from another come
        after all errors that may have caused them, whichever was reported first. Ranks that had to
        be ended come last.
        """
        path = self._path("failure", rank)
        if rank in self.failed:
            return 2, 0
        if not path.exists():
            return 0, 0
        is_caused_elsewhere, _ = json.loads(path.read_text(encoding="utf-8"))
        return int(is_caused_elsewhere), path.stat().st_mtime_ns

    def _failure(self, rank: int) -> RankFailure | None:
        """Return why a rank left no result; None if it left one."""
        ended = self.failed.get(rank)
        if not ended and self._path("result", rank).exists():
            return None
        if not ended and self._path("failure", rank).exists():
            _, failure = json.loads(self._path("failure", rank).read_text(encoding="utf-8"))
            return RankFailure(rank, *failure)
        status = self._processes()[rank].returncode or 0
        how = f"ended by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        reason = ended or f"its process ended without a report: {how}"
        stacks = self._path("stacks", rank)
        text = stacks.read_text(errors="replace") if stacks.exists() else ""
        return RankFailure(rank, "ChildProcessError", reason, text)
