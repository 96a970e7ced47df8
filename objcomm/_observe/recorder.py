"""The latest calls of this process on every group, as plain data and as files for ``inspect``.

Every group remembers its last 256 calls on this rank. That costs half a microsecond per call and
cannot be turned off. ``dump`` returns them at any time. When ranks lose each other (a timeout
expired, a peer died, ranks made different calls), each rank that raises writes its calls to a file,
if ``objcomm.configure(record_folder=...)`` or the environment variable ``OBJCOMM_RECORD_FOLDER``
sets a folder. ``python -m objcomm inspect`` shows the files of all ranks side by side.
"""

import itertools
import json
import os
import socket
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from objcomm._config import GroupLike, settings
from objcomm._observe.history import DUMP_VERSION, LENGTH, CallRecord, Counters, History
from objcomm._observe.log import log
from objcomm._world import (
    group_for_call,
    is_initialized,
    is_world,
    rank,
    ranks_of,
    world_size,
)
from objcomm.errors import (
    BrokenGroupError,
    DesyncError,
    ObjcommError,
    TransportError,
    UsageError,
    text_of,
)

__all__ = ["dump"]

# A program that catches such errors and continues must not fill the disk.
_MOST_FILES = 16

_numbers = itertools.count()

#: Called for each call of any group when it has ended, on the thread that concludes it.
#: ``objcomm.run`` adds one.
listeners: list[Callable[[CallRecord], object]] = []


class Recorder:
    """This rank's latest calls on one group, and their cost.

    Attributes:
        name: torch's name for the group, the same on every rank; empty if torch.distributed is not
            initialized.
        description: torch's description of the group; for a part, the group that it is part of.
        rank: this process's group rank.
        ranks: the global ranks, in group order.
        history: the latest calls on this rank.
        counters: the cost of all calls on this rank.
    """

    def __init__(self, process_group: Any = None, counters: Counters | None = None) -> None:
        self.name = getattr(process_group, "group_name", "")
        self.description = getattr(process_group, "group_desc", "")
        self.rank = 0 if process_group is None else process_group.rank()
        self.ranks = (0,) if process_group is None else ranks_of(process_group)
        self.counters = counters or Counters()
        self.history = History(self.counters)

    def among(self, members: Sequence[int], name: str) -> "Recorder":
        """Return a recorder for a part of the group, whose costs count for the whole group.

        Args:
            members: the ranks of the part within this group, in the part's order.
            name: the name of the part, the same on each of its ranks.
        """
        part = Recorder(counters=self.counters)
        whole = self.name if self.description in {"", "undefined"} else self.description
        part.name, part.description = name, f"part of {whole}"
        part.rank = members.index(self.rank)
        part.ranks = tuple(self.ranks[each] for each in members)
        _parts[part] = None
        return part

    def conclude(self, entry: CallRecord, error: BaseException | None, began: float) -> None:
        """Record how a call has ended.

        Args:
            entry: the call.
            error: the exception that it raises, if any. An ObjcommError gets the latest calls as
                its ``recent``.
            began: when it was called, in seconds of ``time.perf_counter``.
        """
        seconds = time.perf_counter() - began
        entry.end(error, seconds)
        if isinstance(error, ObjcommError):
            self.attach(error)
        cost = entry.rounds, entry.sent_nbytes, entry.received_nbytes
        self.counters.add(entry.operation, cost, seconds)
        for listen in listeners:
            listen(entry)

    def attach(self, error: ObjcommError) -> None:
        """Attach this rank's latest calls on the group to an error.

        If the error means that ranks have lost each other, and a record folder is set, the calls of
        all groups are written to a file there, once per error, and a note with its path is added.
        Never raises, because the error itself matters more.

        Args:
            error: the error that a call is about to raise.
        """
        error.recent = error.recent or tuple(each.position() for each in self.history.entries())
        is_loss = isinstance(error, (TransportError, DesyncError))
        # Every later call raises BrokenGroupError; the error that broke the group was written.
        is_repeated = isinstance(error, BrokenGroupError) or bool(error.recorded)
        if not is_loss or is_repeated:
            return
        folder = settings().record_folder
        if folder is None:
            folder = os.environ.get("OBJCOMM_RECORD_FOLDER", "")
        number = next(_numbers) if folder else _MOST_FILES
        if number >= _MOST_FILES:
            return
        try:
            dump = _dump_of(known_recorders(), is_whole=True)
            cause = {"group": self.name, "type": type(error).__name__, "text": str(error)}
            name = f"objcomm-rank{rank()}-{os.getpid()}-{number}.json"
            path = Path(folder).absolute() / name
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(dump | {"error": cause}, path)
        except Exception as second:  # noqa: BLE001  # see above
            error.add_note(f"objcomm could not write this rank's last calls: {text_of(second)}")
            return
        error.recorded = str(path)
        log.info("this rank's last calls were written to %s", path, extra={"group": self.name})
        error.add_note(
            f"this rank's last calls: {path} (python -m objcomm inspect compares those of all "
            "ranks)"
        )


# The recorders of all live process groups, keyed by the object, because names are reused; their
# parts; and that of calls without torch.distributed. There is no lock, and each access is a single
# step: a process forked while another thread held a lock would wait for it forever.
_known: weakref.WeakKeyDictionary[Any, Recorder] = weakref.WeakKeyDictionary()
_parts: weakref.WeakKeyDictionary[Recorder, None] = weakref.WeakKeyDictionary()
_solo = Recorder()
# At most one: the counters of the world, kept after it is destroyed.
_last_world: list[Counters] = []


def recorder_of(process_group: Any) -> Recorder:
    """Return a process group's recorder; for None, that of calls without torch.distributed."""
    if process_group is None:
        return _solo
    found = _known.get(process_group)
    if found is None:
        found = _known.setdefault(process_group, Recorder(process_group))
        if is_world(process_group):
            _last_world[:] = [found.counters]
    return found


def counters_of(group: GroupLike, operation: str) -> Counters:
    """Return the counters for calls with this ``group=``, even if the group was destroyed.

    Args:
        group: as the user gave it.
        operation: the name of the user's call, for error messages.

    Raises:
        UsageError: a launcher has started other ranks, but nothing is initialized; or ``group``
            is a mesh of several dimensions, or not a group.
        NotInGroupError: this rank is not a member.
    """
    left = None if is_initialized() else _left_of(group)
    return recorder_of(group_for_call(group, operation)).counters if left is None else left


def _left_of(group: GroupLike) -> Counters | None:
    """Return the counters of a destroyed group, if they are still there."""
    if group is None:
        return next(iter(_last_world), None)
    try:
        known = _known.get(group)
    except TypeError:
        return None  # not a group, because it cannot be weakly referenced
    return None if known is None else known.counters


def forget_world() -> None:
    """Drop the counters of a destroyed world, because a call is made without torch.distributed."""
    _last_world.clear()


def known_recorders() -> list[Recorder]:
    """Return the recorders of all live groups that this process has used, including their parts.

    The first is that of calls without torch.distributed.
    """
    groups = [reference() for reference in _known.keyrefs()]
    known = (_known[each] for each in groups if each is not None)
    parts = [reference() for reference in _parts.keyrefs()]
    return [_solo, *known, *(each for each in parts if each is not None)]


def dump(path: str | os.PathLike[str] | None = None, *, group: GroupLike = None) -> dict[str, Any]:
    """Return this rank's latest calls.

    Does not communicate. May be called from any thread, even while another call waits.

    Args:
        path: a file to write the calls to as well, as JSON. An existing file is replaced.
        group: the group whose calls to return; if None, those of all groups that this process has
            used.

    Returns:
        Plain data that can be written as JSON. It describes this process (``rank``,
        ``world_size``, ``host``, ``pid``, ``at`` in seconds since 1970) and contains ``groups``,
        each with its ``name``, its global ``ranks`` and its ``entries``, oldest first. An entry has
        ``operation``, ``sequence``, ``call_site``, ``began``, ``ms`` (None while it is in
        progress), ``sent_nbytes``, ``received_nbytes``, ``codec``, and ``outcome``, which is
        ``"returned"``, ``"under way"`` or the type of its error.

    Raises:
        UsageError: an argument is wrong.
        NotInGroupError: this rank is not a member of ``group``.
        OSError: the file cannot be written.

    Examples:
        >>> import objcomm
        >>> scores = objcomm.all_gather(0.5)
        >>> group, *others = objcomm.recorder.dump()["groups"]
        >>> *before, last = group["entries"]
        >>> last["operation"], last["outcome"]
        ('all_gather', 'returned')
    """
    if not isinstance(path, str | os.PathLike | None):
        raise UsageError(f"dump: path={path!r} must be the path of a file")
    recorders = known_recorders() if group is None else [recorder_of(group_for_call(group, "dump"))]
    dump = _dump_of(recorders, is_whole=group is None)
    if path is not None:
        _write(dump, Path(path))
    return dump


def _dump_of(recorders: list[Recorder], *, is_whole: bool) -> dict[str, Any]:
    own = max(rank(), 0)
    return {
        "objcomm_dump": DUMP_VERSION,
        "rank": own,
        "world_size": max(world_size(), 1),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "at": time.time(),
        "is_whole": is_whole,
        "error": None,
        "groups": [
            {
                "name": each.name,
                "description": each.description,
                # Calls without torch.distributed have rank 0; show this process's rank instead.
                "ranks": list(each.ranks) if each.name else [own],
                "size": len(each.ranks),
                "rank": each.rank,
                "length": LENGTH,
                "entries": entries,
            }
            for each in recorders
            if (entries := each.history.plain()) or not is_whole
        ],
    }


def _write(dump: dict[str, Any], path: Path) -> None:
    """Replace the file atomically: a concurrent reader finds either the old file or the new one.

    The data is first written to a file with an unpredictable name that only this user can read: in
    a folder writable by others, a link with a predictable name could redirect the write.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    unfinished = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            json.dump(dump, file, allow_nan=False)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink()
        raise
