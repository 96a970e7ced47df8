"""The options that apply to calls by default, and the keyword arguments that calls accept.

A call's own options come first, then those of its thread or task, then those of the process. The
environment may supply a key if the program has set none; it can't remove one.
"""

import functools
import hashlib
import operator
import os
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, TypeVar

import torch

from objcomm.errors import UsageError

T = TypeVar("T")

#: An entry of ``allow=``: a class or function, or its name, such as ``"shop.Order"``.
Allowed = type | Callable[..., Any] | str


if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    #: The type of ``group=``: a process group, a one-dimensional device mesh, None for the world.
    GroupLike: TypeAlias = ProcessGroup | DeviceMesh | None
else:
    GroupLike = Any  # a torch without distributed has neither class


#: The type of ``timeout=``: seconds, a timedelta, or None for the group's own.
Timeout: TypeAlias = float | timedelta | None


#: The type of ``device=``.
DeviceLike: TypeAlias = torch.device | str | int | None


LINES: Literal["lines"] = "lines"

#: The type of ``check=``.
Check: TypeAlias = bool | Literal["lines"]


Transport: TypeAlias = Literal["auto", "streams", "gloo"]

#: The values of ``transport=``.
TRANSPORTS: tuple[Transport, ...] = ("auto", "streams", "gloo")

#: Stands for no timeout. A timeout of many years would overflow timers and the clocks of links.
FOREVER_SECONDS = 1e7


_KEY_MIN_NBYTES = 16
_PORTS_MAX = 1 << 16


class CallOptions(TypedDict, total=False):
    """The keywords that every collective operation accepts; see ``objcomm.broadcast``."""

    name: str
    group: GroupLike
    timeout: Timeout


class Options(CallOptions, total=False):
    """The keywords of a collective operation on objects."""

    codec: str | None
    device: DeviceLike
    confirm: bool
    accept: Iterable[str] | None
    allow: Iterable[Allowed] | None


class ShownOptions(Options, total=False):
    """The keywords of an operation on objects that can show a progress bar."""

    progress: bool


class Sync(TypedDict, total=False):
    """The keyword of a call that returns its result."""

    async_op: Literal[False]


class Async(TypedDict):
    """The keyword of a call that returns a Work."""

    async_op: Literal[True]


class MaybeAsync(TypedDict):
    """The keyword of a call that returns a Work or its result."""

    async_op: bool


class WithSource(TypedDict, total=False):
    """The keyword of a call that has a source."""

    group_src: int | None


class WithDestination(TypedDict, total=False):
    """The keyword of a call that has a destination."""

    group_dst: int | None


class SyncOptions(Options, Sync):
    """The keywords of a call that returns its result."""


class AsyncOptions(Options, Async):
    """The keywords of a call that returns a Work."""


class MaybeAsyncOptions(Options, MaybeAsync):
    """The keywords of a call that returns a Work or its result."""


class ShownSyncOptions(ShownOptions, Sync):
    """The keywords of a call that can show a progress bar and returns its result."""


class ShownAsyncOptions(ShownOptions, Async):
    """The keywords of a call that can show a progress bar and returns a Work."""


class ShownMaybeAsyncOptions(ShownOptions, MaybeAsync):
    """The keywords of a call that can show a progress bar and returns a Work or its result."""


# The size of the machine's memory. No message can be larger.
_PHYSICAL_NBYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True)
class Settings:
    """All options.

    Attributes:
        codec: name of the codec that encodes objects.
        max_nbytes: the most bytes that one message may make a rank allocate.
        max_operation_nbytes: the same for all messages that a rank receives in one operation.
        max_depth: how deeply containers may be nested.
        max_buffers: how many buffers one message may have.
        accept: codecs whose messages this rank decodes; ``None`` for all.
        allow: classes and functions that a pickle may name, by name; ``None`` for all.
        secret: derived from the key that signs messages, if the program has set one.
        check: whether ranks agree on each operation first, or ``"lines"`` if a call must be on the
            same line on all ranks; ``None`` to use the environment's setting.
        record_folder: where a rank writes its last calls when ranks lose each other; ``None`` to
            use the environment's setting.
        report_after: after how many seconds a waiting call is logged.
        lost_after: for how many seconds a host may be out of reach.
        transport: what connects ranks; ``None`` to use the environment's setting.
        ports: ports on which other hosts reach this rank; ``None`` to use the environment's
            setting.
    """

    codec: str = "pickle"
    max_nbytes: int = _PHYSICAL_NBYTES
    max_operation_nbytes: int = _PHYSICAL_NBYTES
    max_depth: int = 200
    max_buffers: int = 1 << 19
    accept: frozenset[str] | None = None
    allow: Mapping[str, Any] | None = None
    secret: bytes | None = field(default=None, repr=False)
    check: Check | None = None
    record_folder: str | None = None
    report_after: float = 60.0
    lost_after: float = 60.0
    transport: Transport | None = None
    ports: range | None = None

    @property
    def is_checked(self) -> bool:
        """Whether ranks agree on each operation before it begins."""
        return (environment_check() if self.check is None else self.check) is True

    @property
    def lines_must_agree(self) -> bool:
        """Whether all ranks must make an unnamed call on the same line."""
        return (environment_check() if self.check is None else self.check) == LINES

    @property
    def chosen_transport(self) -> Transport:
        """The transport that connects ranks.

        Raises:
            UsageError: OBJCOMM_TRANSPORT is not the name of a transport.
        """
        if self.transport is not None:
            return self.transport
        return _transport(os.environ.get("OBJCOMM_TRANSPORT") or "auto", "OBJCOMM_TRANSPORT")

    @property
    def chosen_ports(self) -> range:
        """The ports on which other hosts reach this rank; empty for any.

        Raises:
            UsageError: OBJCOMM_PORTS is neither a port nor a range of ports.
        """
        if self.ports is not None:
            return self.ports
        written = os.environ.get("OBJCOMM_PORTS")
        return _ports(written, "OBJCOMM_PORTS") if written else range(0)


class _Process:
    """The options of threads and tasks that have not set their own."""

    settings = Settings()


_own: ContextVar[Settings | None] = ContextVar("objcomm_settings", default=None)


def settings() -> Settings:
    """Return the options in effect in this thread or task."""
    return _own.get() or _Process.settings


def process_settings() -> Settings:
    """Return the options in effect for threads and tasks that have not set their own."""
    return _Process.settings


def settings_with(
    accept: Iterable[str] | None, allow: Iterable[Allowed] | None, operation: str
) -> Settings:
    """Return the options in effect here, overridden by a call's own arguments.

    Args:
        accept: as the user passed it.
        allow: likewise.
        operation: the operation that the user called, for an error's text.

    Raises:
        UsageError: ``accept`` or ``allow`` is not a valid list, or ``allow`` names something that
            does not exist or can't be admitted safely.
    """
    before = settings()
    if accept is None and allow is None:
        return before
    return replace(
        before,
        accept=before.accept if accept is None else _codecs(accept, operation),
        allow=before.allow if allow is None else _admitted(allow, operation),
    )


class _Decoding(threading.local):
    """The options for the message that this thread decodes; None while it decodes none.

    This is not a ContextVar, because Python 3.11 may run the garbage collector inside
    ``ContextVar.set``, and a destructor may then make a call that also sets a variable. In that
    case one of the two values is lost, ``reset`` raises LookupError, or freed memory is read. So
    calls set no ContextVar, and the user's own blocks restore theirs without a token.
    """

    settings: Settings | None = None


#: Set while a codec decodes.
decoding = _Decoding()


def decoding_settings() -> Settings:
    """Return the options in effect for decoding on this thread."""
    return decoding.settings or _own.get() or _Process.settings


class configure:  # noqa: N801  # used as a function and as a context
    """Set options for the rest of this thread or task, or for a ``with`` block.

    An option that is None keeps its current value.

    Args:
        codec: name of the codec that encodes objects. Receivers read it from the message.
        accept: names of the codecs whose messages this rank decodes. A message in any other codec
            is not read and raises DecodeError.
        allow: the classes and functions that a received pickle may name, as objects or as
            ``"module.qualname"``. Any other is refused before it runs, with ForbiddenTypeError.
            Builtin containers and scalars, tensors and arrays need no entry.
        key: bytes or text of at least 16 bytes, the same on every rank. Messages are signed with
            it, and messages without a valid signature are refused with AuthenticationError.
            Default: the key in the file that the environment's OBJCOMM_KEY_FILE names, if set.
        max_nbytes: the most bytes that one message may make this rank allocate. Default: the
            size of the machine's memory.
        max_operation_nbytes: the same for all messages of one operation together. Default: the
            size of the machine's memory.
        max_depth: how deeply containers may be nested in objects that this rank sends with msgpack,
            and in those it receives with msgpack or with ``allow``. Default: 200.
        max_buffers: how many buffers a received message may have. Default: 2**19.
        check: True makes all ranks agree on each operation first; see ``objcomm.check``.
            ``"lines"`` raises DesyncError if two ranks make a call on different lines, unless both
            give it the same ``name=``; it costs nothing, and must be set on every rank. A line is a
            file name without its folder and a line number, so ranks may run from different folders.
            False logs a warning instead, once for each pair of lines. Default: the environment's
            OBJCOMM_CHECK, which may be ``1`` for True, or ``lines``; otherwise False.
        record_folder: folder in which this rank writes its last calls when ranks lose each other;
            ``""`` for none. Default: the environment's OBJCOMM_RECORD_FOLDER. See
            ``objcomm.recorder``.
        report_after: number of seconds after which a waiting call is logged, as a warning from the
            logger ``objcomm`` that shows where the awaited ranks are. The warning is repeated each
            time the wait has doubled. Default: 60; ``math.inf`` for never.
        lost_after: number of seconds that a host may be silent, because it or its network has
            failed, before its ranks count as dead; see the guide on failures. It applies to
            connections made afterwards, on Linux only. Default: 60; ``math.inf`` for the system's
            own limits.
        transport: what connects ranks; it applies to connections made afterwards. ``"streams"``
            uses objcomm's own connections, with shared memory within a host, on Linux only; if
            these can't be made, all ranks raise TransportError. ``"gloo"`` uses a separate Gloo
            group. ``"auto"`` uses streams, or Gloo with a logged warning if streams can't be made
            or another rank has chosen Gloo. Default: the environment's OBJCOMM_TRANSPORT, otherwise
            ``"auto"``.
        ports: ports on which ranks on other hosts reach this rank, such as ``"40000-40100"``, if a
            firewall opens only some. Each rank uses one port for each group. Default: the
            environment's OBJCOMM_PORTS, otherwise any free port. Gloo always uses any free port.
        everywhere: whether to also set the options for threads that have not set their own,
            including those already running. The last such call wins.

    Raises:
        UsageError: a limit is too small or not a number, the key is too short, ``accept`` is not a
            list of names, ``allow`` names something that does not exist or can't be admitted
            safely, ``check`` or ``transport`` is not one of the values above, or ``ports`` is
            neither a port nor a range of ports.

    Examples:
        >>> import objcomm
        >>> with objcomm.configure(codec="msgpack", accept={"msgpack"}):
        ...     objcomm.from_tensor(objcomm.to_tensor([1, 2, 3]))
        [1, 2, 3]
    """

    def __init__(
        self,
        *,
        codec: str | None = None,
        accept: Iterable[str] | None = None,
        allow: Iterable[Allowed] | None = None,
        key: bytes | str | None = None,
        max_nbytes: int | None = None,
        max_operation_nbytes: int | None = None,
        max_depth: int | None = None,
        max_buffers: int | None = None,
        check: Check | None = None,
        record_folder: str | os.PathLike[str] | None = None,
        report_after: float | None = None,
        lost_after: float | None = None,
        transport: Transport | None = None,
        ports: str | None = None,
        everywhere: bool = False,
    ) -> None:
        given = {
            "codec": codec or None,
            "max_nbytes": max_nbytes,
            "max_operation_nbytes": max_operation_nbytes,
            "max_depth": max_depth,
            "max_buffers": max_buffers,
            "check": None if check is None else _checked(check),
            "record_folder": None if record_folder is None else os.fspath(record_folder),
            "report_after": report_after,
            "lost_after": lost_after,
            "transport": transport and _transport(transport, "configure: transport"),
            "ports": None if ports is None else _ports(ports, "configure: ports"),
            "secret": None if key is None else secret_of(key),
        }
        changed: dict[str, Any] = {
            name: value for name, value in given.items() if value is not None
        }
        _check_numbers(changed)
        self._before = _Process.settings if everywhere else None
        mine = replace(settings_with(accept, allow, "configure"), **changed)
        self._former, self._is_set = _own.get(), True
        _own.set(mine)
        if everywhere:
            _Process.settings = mine

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_set:
            _own.set(self._former)  # see ``_Decoding``
            self._is_set = False
        if self._before is not None:
            _Process.settings = self._before
            self._before = None


def check(*, everywhere: bool = False) -> configure:
    """Make all ranks agree on each operation before it begins, for debugging.

    A rank that only sends does not wait for an answer, so it learns only in its next call that
    other ranks were in a different operation. With this option, all ranks first compare their
    operations, and every rank raises DesyncError in the call that differs. This costs about one
    barrier per call. Every rank must set it. ``OBJCOMM_CHECK=1`` in the environment sets it for a
    whole job, unless the program calls ``configure(check=False)``.

    Args:
        everywhere: as in ``configure``.

    Returns:
        What ``configure(check=True)`` returns. The option is set for the rest of this thread or
        task, or for a ``with`` block.

    Examples:
        >>> import objcomm
        >>> with objcomm.check():
        ...     objcomm.broadcast("checked")
        'checked'
    """
    return configure(check=True, everywhere=everywhere)


@functools.cache
def environment_check() -> Check:
    """Return the value of OBJCOMM_CHECK, for a program that never sets ``configure(check=)``.

    Raises:
        UsageError: it is not 0, 1 or lines.
    """
    value = os.environ.get("OBJCOMM_CHECK", "")
    if value not in {"", "0", "1", LINES}:
        raise UsageError(f"OBJCOMM_CHECK={value!r} must be 0, 1 or lines")
    return LINES if value == LINES else value == "1"


@functools.cache
def shows_full_tracebacks() -> bool:
    """Whether tracebacks show objcomm's own frames: OBJCOMM_FULL_TRACEBACKS=1, or ``-X dev``."""
    return sys.flags.dev_mode or os.environ.get("OBJCOMM_FULL_TRACEBACKS", "") not in {"", "0"}


def _checked(check: object) -> Check:
    """Validate ``check=``.

    Raises:
        UsageError: it is neither a bool nor ``"lines"``.
    """
    if check == LINES:
        return LINES
    if check in (True, False):  # not a set, because a list can't be hashed
        return bool(check)
    raise UsageError(f"configure: check={check!r} must be True, False or 'lines'")


def _transport(chosen: object, name: str) -> Transport:
    """Validate the name of a transport.

    Args:
        chosen: as the user passed it.
        name: name of the argument or variable, for an error's text.

    Raises:
        UsageError: there is no such transport.
    """
    for each in TRANSPORTS:
        if chosen == each:
            return each
    raise UsageError(f"{name}={chosen!r} must be one of {', '.join(map(repr, TRANSPORTS))}")


def _ports(written: object, name: str) -> range:
    """Parse a range of ports such as ``"40000-40100"``, which includes the last one.

    Args:
        written: as the user passed it.
        name: name of the argument or variable, for an error's text.

    Raises:
        UsageError: it is neither a port nor a range of ports.
    """
    first, _, last = written.partition("-") if isinstance(written, str) else ("", "", "")
    if first.strip().isdecimal() and (last or first).strip().isdecimal():
        ports = range(int(first), int(last or first) + 1)
        if ports and ports[0] > 0 and ports[-1] < _PORTS_MAX:
            return ports
    raise UsageError(
        f"{name}={written!r} must be a port from 1 to 65535, or a range of ports, "
        'such as "40000-40100"'
    )


def _check_numbers(changed: Mapping[str, Any]) -> None:
    """Validate limits and waits.

    Raises:
        UsageError: one is not a number, or is too small.
    """
    for name in changed.keys() & {"report_after", "lost_after"}:
        seconds = changed[name]
        is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if not is_number or not seconds > 0:
            raise UsageError(f"configure: {name}={seconds!r} must be a number of seconds above 0")
    for name in changed.keys() & {"max_nbytes", "max_operation_nbytes", "max_depth", "max_buffers"}:
        limit = changed[name]
        if not isinstance(limit, int) or isinstance(limit, bool):
            raise UsageError(f"configure: {name}={limit!r} must be an integer")
        least = 0 if name == "max_buffers" else 1
        if limit < least:
            raise UsageError(f"configure: {name}={limit} must be {least} or more")


def _codecs(accept: Iterable[str], operation: str) -> frozenset[str]:
    names = [accept] if isinstance(accept, str) else _members(accept)
    if names is None or not all(isinstance(each, str) for each in names):
        raise UsageError(
            f"{operation}: accept={accept!r} must be a list of codec names, such as ['msgpack'], "
            "or None"
        )
    return frozenset(names)


def _members(given: Iterable[T]) -> list[T] | None:
    """Return the items of an iterable; None for anything else, such as a number or a class."""
    try:
        return list(given)
    except TypeError:
        return None


# numpy reads arbitrary bytes as addresses of objects, and divides by zero for some dtype names.
_BEYOND_CHECKING = frozenset({"numpy.ndarray", "numpy.dtype"})


def _admitted(allow: Iterable[Allowed], operation: str) -> dict[str, Any]:
    """Return the allowed classes and functions by the names that a pickle uses for them."""
    admitted = {}
    listed = [allow] if isinstance(allow, str) else _members(allow)
    if listed is None:
        raise UsageError(
            f"{operation}: allow={allow!r} must be a list of classes, functions and their names, "
            "or None"
        )
    for each in listed:
        found = _named(each, operation) if isinstance(each, str) else each
        name = f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', '')}"
        if not callable(found) or not name.strip("."):
            raise UsageError(
                f"{operation}: allow= lists classes, functions and their names, not {each!r}"
            )
        if name in _BEYOND_CHECKING:
            raise UsageError(
                f"{operation}: allow= lists {name}, with which any message could end this process; "
                "dtypes and arrays of plain memory need no entry"
            )
        admitted[name] = found
        if isinstance(each, str):
            admitted[each] = found
    return admitted


def _named(name: str, operation: str) -> Any:
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"{operation}: allow= names {name!r}, which does not exist: {error}"
        ) from error


def seconds_of(operation: str, timeout: float | timedelta) -> float:
    """Convert ``timeout=`` to seconds, at most ``FOREVER_SECONDS``.

    Raises:
        UsageError: it is not a positive time.
    """
    seconds: Any = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not seconds > 0:
        raise UsageError(
            f"{operation}: timeout={timeout!r} must be a positive number of seconds, a timedelta "
            "or None"
        )
    return float(min(seconds, FOREVER_SECONDS))


def check_name(name: object, operation: str) -> None:
    """Validate the name of a call.

    Raises:
        UsageError: it is not a string.
    """
    if not isinstance(name, str):
        raise UsageError(f"{operation}: name={name!r} must be a string")


def whole_number(value: object) -> int | None:
    """Return an integer, including numpy's, as an int; None for anything else, even a bool."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # checked by the call
    except TypeError:
        return None


def parse_device(device: DeviceLike, operation: str) -> torch.device | None:
    """Convert ``device=`` to a torch device.

    Args:
        device: as the user passed it.
        operation: the operation that the user called, for an error's text.

    Raises:
        UsageError: torch has no such device.
    """
    if device is None:
        return None
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(
            f"{operation}: device={device!r} must be a torch.device, its name or number, or None: "
            f"{error}"
        ) from error


def secret_of(key: bytes | str) -> bytes:
    """Derive the 64 bytes that are used from here on in place of a user's key.

    Raises:
        UsageError: the key is neither bytes nor text, or is too short to resist guessing.
    """
    if not isinstance(key, (bytes, str)):
        raise UsageError(f"a key must be bytes or a string, not a {type(key).__name__}")
    raw = key.encode() if isinstance(key, str) else key
    if len(raw) < _KEY_MIN_NBYTES:
        raise UsageError(f"a key of {len(raw)} bytes is too short; give {_KEY_MIN_NBYTES} or more")
    return hashlib.blake2b(raw, person=b"objcomm secret").digest()


#: Other libraries' names, and those that errors suggest instead. The libraries: torch.distributed,
#: mpi4py, accelerate, Horovod, SpeechBrain, Lightning, detectron2 and mmengine.
NAMES_ELSEWHERE = {
    "Allreduce": "all_reduce",
    "Barrier": "barrier",
    "Create_group": "new_group",
    "Dup": "dup",
    "Get_rank": "rank",
    "Get_size": "world_size",
    "PartialState": "init",
    "Shrink": "survivors",
    "Split": "split",
    "Split_type": "node_group",
    "all_gather_object": "all_gather",
    "allgather": "all_gather",
    "allgather_object": "all_gather",
    "allreduce": "all_reduce",
    "all_reduce_dict": "metrics.average_metrics",
    "alltoall": "all_to_all",
    "bcast": "broadcast",
    "broadcast_object": "broadcast",
    "broadcast_object_list": "broadcast",
    "check_trigger": "any_rank",
    "collect_results": "gather",
    "ddp_all_reduce": "all_reduce",
    "ddp_barrier": "barrier",
    "ddp_init_group": "init",
    "destroy_process_group": "shutdown",
    "gather_for_metrics": "all_gather",
    "gather_object": "gather",
    "get_rank": "rank",
    "get_world_size": "world_size",
    "if_main_process": "is_main",
    "init_process_group": "init",
    "is_distributed_initialized": "is_initialized",
    "is_main_process": "is_main",
    "local_main_process_first": "node_first",
    "main_process_first": "main_first",
    "master_only": "main_process_only",
    "monitored_barrier": "barrier",
    "num_processes": "world_size",
    "on_main_process": "main_process_only",
    "on_process": "main_process_only",
    "process_index": "rank",
    "rank_zero_first": "main_first",
    "rank_zero_only": "main_process_only",
    "recv_object_list": "recv",
    "reduce_dict": "metrics.average_metrics",
    "reduce_scatter_object": "reduce_scatter",
    "reducescatter": "reduce_scatter",
    "scatter_object_list": "scatter",
    "send_object_list": "send",
    "shared_random_seed": "shared_seed",
    "size": "world_size",
    "sync_random_seed": "shared_seed",
    "synchronize": "barrier",
    "wait_for_everyone": "barrier",
    "waitall": "wait_all",
}

#: Other libraries' operators, in lower case, and those that errors suggest instead.
OPERATORS_ELSEWHERE = {
    "add": "sum",
    "average": "mean",
    "avg": "mean",
    "land": "all",
    "lor": "any",
    "maximum": "max",
    "maxloc": "argmax",
    "minimum": "min",
    "minloc": "argmin",
    "mul": "prod",
    "product": "prod",
}

#: Other libraries' keywords, and those that errors suggest instead.
KEYWORDS_ELSEWHERE = {
    "dest": "dst=",
    "group_dest": "group_dst=",
    "group_source": "group_src=",
    "root": "src= or dst=",
    "root_rank": "src= or dst=",
    "source": "src=",
}
