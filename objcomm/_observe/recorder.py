"""What this process did last, on every group: as plain data, and as a file for ``inspect``.

Every group keeps its last 256 calls on this rank; that costs half a microsecond a call and can't
be turned off. ``dump`` tells them at any time. When ranks lose each other (a time limit passed, a
peer died, ranks were in different calls) each rank that raises writes its own to a file, if
``objcomm.configure(record_folder=...)`` or the environment's ``OBJCOMM_RECORD_FOLDER`` names a
folder. ``python -m objcomm inspect`` lays the files of all ranks side by side.
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

# A program that catches such errors and goes on must not fill a disk.
_MOST_FILES = 16

_numbers = itertools.count()

#: What is asked to note each call as well, of whatever group, when it has ended: on the thread that
#: concludes it. ``objcomm.run`` adds one.
listeners: list[Callable[[CallRecord], object]] = []


class Recorder:
    """What this rank did last on one group, and what it cost.

    Attributes:
        name: torch's name of the group, the same on every rank; empty where torch.distributed is
            not initialised.
        description: what torch says that it is for; of a part, whose part it is.
        rank: this process's, within the group.
        ranks: their global ranks, in group order.
        history: its last operations on this rank.
        counters: what its operations cost this rank.
    """

    def __init__(self, process_group: Any = None, counters: Counters | None = None) -> None:
        self.name = getattr(process_group, "group_name", "")
        self.description = getattr(process_group, "group_desc", "")
        self.rank = 0 if process_group is None else process_group.rank()
        self.ranks = (0,) if process_group is None else ranks_of(process_group)
        self.counters = counters or Counters()
        self.history = History(self.counters)

    def among(self, members: Sequence[int], name: str) -> "Recorder":
        """One for calls of some of the ranks, whose costs count as the whole group's.

        Args:
            members: ranks within this group, in their order.
            name: the same on each of them.
        """
        part = Recorder(counters=self.counters)
        whole = self.name if self.description in {"", "undefined"} else self.description
        part.name, part.description = name, f"part of {whole}"
        part.rank, part.ranks = (
            members.index(self.rank),
            tuple(self.ranks[each] for each in members),
        )
        _recorders.add(part)
        return part

    def conclude(self, entry: CallRecord, error: BaseException | None, began: float) -> None:
        """Note how a call has ended.

        Args:
            entry: the call.
            error: what it raises; one of objcomm's own gets the latest calls as its ``recent``.
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
        """Give an error what this rank did last on this group.

        If it says that ranks lost each other, and there is a folder for that, all groups' calls are
        written there, once for each error, and its text says where. Never raises: the error itself
        matters more.

        Args:
            error: what is about to leave a call.
        """
        error.recent = error.recent or tuple(each.position() for each in self.history.entries())
        is_loss = isinstance(error, (TransportError, DesyncError))
        # Every later call raises this; the error that broke the group has been written.
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
            told = _told(known_recorders(), is_whole=True)
            cause = {"group": self.name, "type": type(error).__name__, "text": str(error)}
            name = f"objcomm-rank{rank()}-{os.getpid()}-{number}.json"
            path = Path(folder).absolute() / name
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(told | {"error": cause}, path)
        except Exception as second:  # noqa: BLE001  # see above
            error.add_note(f"objcomm could not write this rank's last calls: {text_of(second)}")
            return
        error.recorded = str(path)
        log.info("this rank's last calls were written to %s", path, extra={"group": self.name})
        error.add_note(
            f"this rank's last calls: {path} (python -m objcomm inspect compares those of all "
            "ranks)"
        )


class _Recorders:
    """Those of all live process groups, by the object and never by its name, which recurs.

    Each method takes one step, and no lock: a process that was forked while another thread had it
    would wait for that thread for ever.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, Recorder] = weakref.WeakKeyDictionary()
        self._parts: weakref.WeakKeyDictionary[Recorder, None] = weakref.WeakKeyDictionary()
        self._solo = Recorder()
        self._last_world: Counters | None = None  # these outlive it

    def of(self, process_group: Any) -> Recorder:
        if process_group is None:
            return self._solo
        found = self._known.get(process_group)
        if found is None:
            found = self._known.setdefault(process_group, Recorder(process_group))
            if is_world(process_group):
                self._last_world = found.counters
        return found

    def add(self, part: Recorder) -> None:
        self._parts[part] = None

    def left_of(self, group: GroupLike) -> Counters | None:
        if group is None:
            return self._last_world
        try:
            known = self._known.get(group)
        except TypeError:
            return None  # what no weak reference can be made to is no group
        return None if known is None else known.counters

    def forget_world(self) -> None:
        self._last_world = None

    def all(self) -> list[Recorder]:
        groups = [reference() for reference in self._known.keyrefs()]
        known = (self._known[each] for each in groups if each is not None)
        parts = [reference() for reference in self._parts.keyrefs()]
        return [self._solo, *known, *(each for each in parts if each is not None)]


_recorders = _Recorders()


def recorder_of(process_group: Any) -> Recorder:
    """The one of a process group; of calls that were made without torch.distributed for None."""
    return _recorders.of(process_group)


def counters_of(group: GroupLike, operation: str) -> Counters:
    """Where the calls with this ``group=`` count; once it was destroyed, where they did.

    Args:
        group: as the user gave it.
        operation: which call asks, for an error's text.

    Raises:
        UsageError: the environment promises other ranks, but nothing is initialised; or it is a
            mesh of several dimensions, or no group at all.
        NotInGroupError: this rank is no member.
    """
    left = None if is_initialized() else _recorders.left_of(group)
    return recorder_of(group_for_call(group, operation)).counters if left is None else left


def forget_world() -> None:
    """A call is made without torch.distributed: what a world has counted before is over."""
    _recorders.forget_world()


def known_recorders() -> list[Recorder]:
    """Of every group, or part of one, that this process has used and that still lives.

    The first one is of calls that were made without torch.distributed.
    """
    return _recorders.all()


def dump(path: str | os.PathLike[str] | None = None, *, group: GroupLike = None) -> dict[str, Any]:
    """Tell this rank's last calls.

    Local: needs no other rank, and may be called from any thread, also while a call waits.

    Args:
        path: a file to write them to as well, as JSON; another file of that name is replaced.
        group: tell only this one's; those of all groups that this process has used if None.

    Returns:
        Plain data that JSON can hold. It describes this process (``rank``, ``world_size``,
        ``host``, ``pid``, ``at`` in seconds since 1970) and ``groups``, each with its ``name``, its
        global ``ranks`` and its ``entries``, oldest first. An entry has ``operation``,
        ``sequence``, ``call_site``, ``began``, ``ms`` (None while it is under way),
        ``sent_nbytes``, ``received_nbytes``, ``codec``, and as ``outcome`` ``"returned"``,
        ``"under way"`` or the type of its error.

    Raises:
        UsageError: an argument is wrong.
        NotInGroupError: this rank is not a member of ``group``.
        OSError: the file can't be written.

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
    told = _told(recorders, is_whole=group is None)
    if path is not None:
        _write(told, Path(path))
    return told


def _told(recorders: list[Recorder], *, is_whole: bool) -> dict[str, Any]:
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
                # A world of one counts from 0, whatever this process was or became elsewhere.
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


def _write(told: dict[str, Any], path: Path) -> None:
    """Replace the file in one step: who reads it at that moment finds the old one or the new.

    It is written under a name that nobody could know before, and to be read by this user only: in a
    folder that others can write to, a link of a known name would lead elsewhere.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    unfinished = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            json.dump(told, file, allow_nan=False)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink()
        raise
