"""Stores in which ranks meet: this process's connections to one, and what ranks leave there.

The host of torch's ``TCPStore`` looks up the name of whoever connects, and answers nobody
meanwhile: where the resolver loses a query, a new connection holds all ranks for 5 s. So those that
are there are used again.

Anybody who reaches a store may replace what stands there. A record in it is a named tuple or a
dataclass, and what it declares its fields to be is what is taken for one: no more is checked by
whoever reads it.
"""

from __future__ import annotations  # torch may be built without distributed

import contextlib
import dataclasses
import functools
import os
import socket
import types
import typing
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

import msgpack
import torch.distributed as dist

from objcomm._transport.sockets import connected, has_closed, notice_outages, open_sockets
from objcomm._world import bare
from objcomm.errors import WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


_NO_KEY = "objcomm/nobody writes this"
_NOTHING = "objcomm has found nothing"  # no value of ours begins so

# For a host that is there to take a connection; what takes longer is left to torch.
_TAKEN_WITHIN_SECONDS = 1.0


def reason_of(error: BaseException) -> str:
    """What torch says, without its source file and its general advice."""
    text = str(error)
    if text.startswith("["):
        text = text.partition("] ")[2]
    return text.partition(". This is typically")[0]


def read(store: dist.Store | UntilLost, key: str) -> bytes | None:
    """What stands under a key, if there is something; blocks no longer than the answer takes.

    Between torch's ``check`` and ``get`` another rank may remove the key, and ``get`` waits for the
    store's own limit then, 5 minutes. To compare is one step, and changes nothing here.
    """
    found: bytes = store.compare_set(key, _NOTHING, _NOTHING)
    return None if found == _NOTHING.encode() else found


def loopback_store() -> dist.TCPStore:
    """A store that this process hosts for ranks on this machine, on a free port.

    On a socket for both families, as torch makes it, a client is called ``::ffff:127.0.0.1``, which
    is in no hosts file. On this one it is ``127.0.0.1``, and the host need not ask for its name. A
    client still asks for that of the host, and alone waits for the answer (torch 2.13).
    """
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return dist.TCPStore(
            "127.0.0.1",
            listening.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )


class UntilLost:
    """A store that is asked nothing more once its host is gone.

    Torch writes a page to stderr, with its own C++ frames, each time that it finds that out.
    """

    def __init__(self, store: dist.Store, ends: Mapping[int, int]) -> None:
        """Begin.

        Args:
            store: which.
            ends: this process's connections to it, as ``sockets.connected`` gives them.
        """
        self._store = store
        self._ends = dict(ends)
        self._lost = ""

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        """The store's operation of that name; raises ``DistNetworkError`` once one has."""
        ask = getattr(self._store, operation)

        def asked(*arguments: object) -> Any:
            if self._ends and all(has_closed(*each) for each in self._ends.items()):
                self._lost = self._lost or "the store's host has closed the connection"
            if self._lost:
                raise dist.DistNetworkError(self._lost)
            try:
                return ask(*arguments)
            except dist.DistNetworkError as error:
                self._lost = str(error)
                raise

        return asked


class Clients:
    """This process's connections to one store, each lent to one thread at a time.

    A ``TCPStore`` lets one thread in, and who waits in it keeps the others out: two threads that
    connect at once over the same one, or over the user's own, would wait for each other.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._free: list[dist.Store] = []
        self._latest: dict[int, int] = {}  # of ``connected``

    def take(self, store: dist.Store, lost_seconds: float) -> dist.Store:
        """A connection that nobody else uses, until it is given back.

        It blocks in C++ if there is none and the store's host is slow.

        Args:
            store: where a new one shall lead, with its prefix; the same at each call.
            lost_seconds: for how long the store's host may be out of reach.

        Raises:
            DistNetworkError: the latest has closed, and so has the store.
        """
        if self._pid != os.getpid():  # what a parent has opened is the parent's
            self._pid, self._free = os.getpid(), []
        while (kept := self._last_kept()) is not None:
            # It may have broken while nobody used it, by an outage for instance.
            with contextlib.suppress(dist.DistNetworkError):
                kept.check([_NO_KEY])
                return kept
        if self._latest and all(has_closed(*each) for each in self._latest.items()):
            refuse_lost(store)
        before = open_sockets()
        own: dist.Store = store.clone()  # type: ignore[attr-defined]  # torch's stubs leave it out
        if isinstance(end := bare(own), dist.TCPStore):
            # Nothing else asks on it, maybe for hours, in which a firewall may forget it.
            notice_outages(before, lost_seconds, end.port)
            self._latest = connected(before, end.port)
        return own

    def _last_kept(self) -> dist.Store | None:
        with contextlib.suppress(IndexError):
            return self._free.pop()
        return None

    def give_back(self, own: dist.Store) -> None:
        """Let others use it; one that has raised is to be dropped: an answer may be under way."""
        self._free.append(own)


def refuse_lost(store: dist.Store) -> None:
    """Raise if nobody listens where a store was: torch tries on for its own limit, 5 minutes.

    An outage is not told so, and may pass.
    """
    if isinstance(end := bare(store), dist.TCPStore):
        try:
            socket.create_connection((end.host, end.port), _TAKEN_WITHIN_SECONDS).close()
        except ConnectionRefusedError as error:
            raise dist.DistNetworkError(str(error)) from error
        except OSError:
            pass


R = TypeVar("R")

# What ranks tell of thousands of ranks is shorter. In memory a hostile record is 75 times as long.
_RECORD_MAX_NBYTES = 4 << 20

_TEXT_ERRORS = "surrogatepass"  # call sites and messages hold what the file system and users give


def pack_record(record: Sequence[Any]) -> bytes:
    """A named tuple as bytes; ``unpack_record`` says what its fields may be."""
    packed: bytes = msgpack.packb(record, default=dataclasses.astuple, unicode_errors=_TEXT_ERRORS)
    return packed


def unpack_record(raw: bytes, kind: type[R], what: str) -> R:
    """The record of which these bytes were made.

    Args:
        raw: what ``pack_record`` gave.
        kind: the record's type. Its fields are numbers, text, bytes, members of an enum, other
            records, tuples of these, or None instead; ``Annotated`` with a range bounds a number.
        what: the record's name, for the error.

    Raises:
        WireError: another program wrote it, a field is not what ``kind`` says, or it is too long.
    """
    if len(raw) > _RECORD_MAX_NBYTES:
        raise WireError(f"the store holds {what} of {len(raw)} bytes, which objcomm did not write")
    try:
        make: Callable[[Any], R] = _maker(typing.cast("Any", kind))
        return make(msgpack.unpackb(raw, unicode_errors=_TEXT_ERRORS))
    except (ValueError, TypeError) as error:
        raise WireError(f"the store holds {what} that can't be read") from error


@functools.cache
def _maker(kind: Any) -> Callable[[Any], Any]:
    """What makes a ``kind`` of plain data, or raises ValueError or TypeError."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    make: Callable[[Any], Any]
    if origin is typing.Annotated:
        make = functools.partial(_bounded, arguments[1])
    elif origin is types.UnionType:
        make = functools.partial(_optional, _maker(arguments[0]))
    elif origin is tuple and arguments[-1] is ...:
        make = functools.partial(_repeated, _maker(arguments[0]))
    elif origin is tuple:
        make = functools.partial(_fixed, [_maker(each) for each in arguments], _together)
    elif kind is float:
        make = _number
    elif kind in {bool, int, str, bytes}:
        make = functools.partial(_exact, kind)
    elif issubclass(kind, Enum):
        make = functools.partial(_member, kind)
    else:
        hints = typing.get_type_hints(kind, include_extras=True)
        make = functools.partial(_fixed, [_maker(each) for each in hints.values()], kind)
    return make


def _exact(kind: type[R], plain: Any) -> R:
    if type(plain) is not kind:
        raise TypeError
    return plain


def _number(plain: Any) -> float:
    return plain if type(plain) is float else float(_exact(int, plain))


def _member(kind: type[Enum], plain: Any) -> Enum:
    return kind(_exact(int, plain))


def _bounded(bounds: range, plain: Any) -> int:
    if _exact(int, plain) not in bounds:
        raise ValueError
    return int(plain)


def _optional(make: Callable[[Any], Any], plain: Any) -> Any:
    return None if plain is None else make(plain)


def _repeated(make: Callable[[Any], Any], plain: Any) -> tuple[Any, ...]:
    return tuple([make(each) for each in _exact(list, plain)])


def _together(*members: Any) -> tuple[Any, ...]:
    return members


def _fixed(makers: Sequence[Callable[[Any], Any]], kind: Callable[..., Any], plain: Any) -> Any:
    """As many members as there are makers."""
    members = zip(makers, _exact(list, plain), strict=True)
    return kind(*[make(each) for make, each in members])
