"""What this process did last, on every group: as plain data, and as a file for ``inspect``.

Every group keeps its last 256 calls on this rank; that costs about a microsecond a call and can't
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
from pathlib import Path
from typing import Any

from objcomm.algorithms.exchange import Exchange
from objcomm.calls.group import Group, known_groups, resolve, solo_group
from objcomm.config import GroupLike, settings
from objcomm.errors import BrokenGroupError, DesyncError, ObjcommError, TransportError, text_of
from objcomm.observe.history import DUMP_VERSION, LENGTH, Entry
from objcomm.observe.log import log
from objcomm.world import rank, world_size

__all__ = ["dump"]

# A program that catches such errors and goes on must not fill a disk.
_MOST_FILES = 16

_numbers = itertools.count()


def conclude(
    group: Group, entry: Entry, exchange: Exchange | None, error: BaseException | None, began: float
) -> None:
    """Note how a call has ended, and what it cost.

    Args:
        group: whose.
        entry: the call.
        exchange: its traffic, if there was any.
        error: what it raises; one of objcomm's own gets the latest calls as its ``record``.
        began: when it was called, in seconds of ``time.perf_counter``.
    """
    seconds = time.perf_counter() - began
    if exchange is not None:
        entry.sent_nbytes = exchange.sent_nbytes
        entry.received_nbytes = exchange.received_nbytes
    entry.end(error, seconds)
    if isinstance(error, ObjcommError):
        attach(error, group)
    group.counters.add(
        entry.operation,
        exchanges=0 if exchange is None else exchange.rounds,
        sent_nbytes=entry.sent_nbytes,
        received_nbytes=entry.received_nbytes,
        seconds=seconds,
    )


def dump(path: str | os.PathLike[str] | None = None, *, group: GroupLike = None) -> dict[str, Any]:
    """Tell this rank's last calls.

    Local: needs no other rank, and may be called from any thread, also while a call waits.

    Args:
        path: a file to write them to as well, as JSON; another file of that name is replaced.
        group: tell only this one's; those of all groups that this process has used if None.

    Returns:
        Plain data that JSON can hold: this process (``rank``, ``world_size``, ``host``, ``pid``,
        ``at`` in seconds since 1970) and ``groups``, each with its ``name``, its global ``ranks``
        and its ``entries``, oldest first. An entry has ``operation``, ``sequence``, ``call_site``,
        ``began``, ``ms`` (None while it is under way), ``sent_nbytes``, ``received_nbytes``,
        ``codec``, and as ``outcome`` ``"returned"``, ``"under way"`` or the type of its error.

    Raises:
        NotInGroupError: this rank is no member of ``group``.
        OSError: the file can't be written.

    Examples:
        >>> import objcomm
        >>> scores = objcomm.all_gather(0.5)
        >>> group, *others = objcomm.recorder.dump()["groups"]
        >>> *before, last = group["entries"]
        >>> last["operation"], last["outcome"]
        ('all_gather', 'returned')
    """
    groups = [solo_group(), *known_groups()] if group is None else [resolve(group)]
    told = _told(groups, is_whole=group is None)
    if path is not None:
        _write(told, Path(path))
    return told


def attach(error: ObjcommError, group: Group) -> None:
    """Give an error what this rank did last on its group.

    If it says that ranks lost each other, and there is a folder for that, all groups' calls are
    written there, once for each error, and its text says where. Never raises: the error itself
    matters more.

    Args:
        error: what is about to leave a call.
        group: whose call it is.
    """
    error.recent = error.recent or tuple(each.position() for each in group.history.entries())
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
        told = _told([solo_group(), *known_groups()], is_whole=True)
        cause = {"group": group.name, "type": type(error).__name__, "text": str(error)}
        name = f"objcomm-rank{rank()}-{os.getpid()}-{number}.json"
        path = Path(folder).absolute() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(told | {"error": cause}, path)
    except Exception as second:  # noqa: BLE001  # see above
        error.add_note(f"objcomm could not write this rank's last calls: {text_of(second)}")
        return
    error.recorded = str(path)
    log.info("this rank's last calls were written: %s", path, extra={"group": group.name})
    error.add_note(
        f"this rank's last calls: {path} (python -m objcomm inspect lays all ranks' side by side)"
    )


def _told(groups: list[Group], *, is_whole: bool) -> dict[str, Any]:
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
                "name": group.name,
                "description": group.description,
                # A world of one counts from 0, whatever this process was or became elsewhere.
                "ranks": list(group.ranks) if group.name else [own],
                "size": group.size,
                "rank": group.rank,
                "length": LENGTH,
                "entries": entries,
            }
            for group in groups
            if (entries := group.history.plain()) or not is_whole
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
