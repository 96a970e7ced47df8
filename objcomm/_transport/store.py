"""Stores in which ranks meet: this process's connections to them, and the records in them.

The host of torch's ``TCPStore`` looks up the name of each new client, and answers no other client
meanwhile. If the resolver loses a query, one new connection delays all ranks by 5 s. Each one also
costs the host a descriptor. So connections are shared where they can be, and otherwise reused.

Any process that reaches a store may replace its values. A record is a named tuple or a dataclass,
and reading one checks each field against its declared type. Readers check nothing else.
"""

from __future__ import annotations  # torch may be built without distributed

import contextlib
import dataclasses
import functools
import os
import socket
import threading
import types
import typing
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

import msgpack
import torch.distributed as dist

from objcomm._transport.sockets import (
    connected,
    hang_up,
    has_closed,
    listens_on,
    notice_outages,
    open_sockets,
    other_ends,
)
from objcomm._world import bare
from objcomm.errors import WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeAlias

    # A ``dist.Store`` or a ``StorePart``. torch's stubs lack half of the operations.
    AnyStore: TypeAlias = Any


_NO_KEY = "objcomm/nobody writes this"
_NOTHING = "objcomm has found nothing"  # no value of objcomm starts like this

_NOT_CONNECTED = "not connected to the store"

# For a host that is up and takes connections; slower cases are left to torch.
_TAKEN_WITHIN_SECONDS = 1.0


def reason_of(error: BaseException) -> str:
    """Return torch's message without its source file and its general advice."""
    text = str(error)
    if text.startswith("["):
        text = text.partition("] ")[2]
    return text.partition(". This is typically")[0]


def read(store: AnyStore, key: str) -> bytes | None:
    """Return the value of a key, or None; blocks only as long as the store takes to answer.

    Between torch's ``check`` and ``get`` another rank may remove the key, and ``get`` would then
    wait for the store's own limit, 5 minutes. A comparison is a single step, and changes nothing
    here.
    """
    found: bytes = store.compare_set(key, _NOTHING, _NOTHING)
    return None if found == _NOTHING.encode() else found


def loopback_store() -> dist.TCPStore:
    """Return a store that this process hosts for ranks on this machine, on a free port.

    On a dual-stack socket, as torch creates it, a client's address is ``::ffff:127.0.0.1``, which
    is in no hosts file. On this one it is ``127.0.0.1``, so the host need not query a name server.
    A client still looks up the host's name, but only the client waits for that (torch 2.13).
    """
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return dist.TCPStore(
            "127.0.0.1",
            listening.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )


def is_hosted_here(store: dist.Store) -> bool:
    """Return whether this process hosts a ``TCPStore``, which goes when its last reference does."""
    end = bare(store)
    return isinstance(end, dist.TCPStore) and listens_on(end.port)


class SharedStore:
    """One connection to a store for all threads of this process that only read and write.

    None of their requests waits for another rank, so each is held up only while the store answers
    the others. Where torch itself uses a store, it may wait in it: see ``Clients``.
    """

    def __init__(self) -> None:
        # Reentrant, because a finalizer that runs during a request may need the store.
        self._lock = threading.RLock()
        self._own: dist.Store | None = None
        self._ends: dict[int, int] = {}  # from ``connected``
        self._lost = ""
        self._addresses: set[Any] = set()
        self._is_over = False

    def open(self, store: dist.Store, lost_seconds: float) -> None:
        """Connect, unless a connection exists and works.

        Connecting blocks in C++ while the store's host is slow. ``store`` is not kept, because the
        process that hosts it would do so for as long as it is referenced.

        Args:
            store: the store; the same in each call.
            lost_seconds: how long the store's host may be out of reach.

        Raises:
            DistNetworkError: the connection has closed, and so has the store.
        """
        with self._lock:
            if self._own is not None and not self._is_lost():
                return
            if self._is_over:
                raise dist.DistNetworkError(self._lost or _NOT_CONNECTED)
            if self._own is not None:
                refuse_lost(store)
            self._own, self._ends, self._addresses = _client(store, lost_seconds)
            self._lost = ""

    @property
    def port(self) -> int:
        """The port of a connected ``TCPStore``; 0 for another store."""
        return getattr(bare(self._own), "port", 0)

    def request(self, prefix: str, operation: str, *arguments: object) -> Any:
        """Return the result of a store's operation on keys that begin with a prefix.

        Once the store's host is gone, nothing is requested: torch writes a page to stderr, with its
        C++ stack, each time that it detects that. Nor is anything after an error, because the late
        answer would be taken for that of the next request.

        Raises:
            DistNetworkError: the store's host is gone, or was never reached.
        """
        with self._lock:
            if self._own is None or self._is_lost():
                raise dist.DistNetworkError(self._lost or _NOT_CONNECTED)
            try:
                return getattr(dist.PrefixStore(prefix, self._own), operation)(*arguments)
            except dist.DistNetworkError as error:
                self._lost = str(error)
                raise

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._own, self._ends = None, {}

    def has_closed(self, seconds: float) -> bool:
        """Return whether the store's host closes an open connection within ``seconds``."""
        return all(has_closed(*each, seconds) for each in self._ends.items())

    def hang_up(self) -> None:
        """End this process's connections to the store for good; threads that use one wake up."""
        self._is_over = True
        hang_up(self._addresses)

    def _is_lost(self) -> bool:
        if self._ends and self.has_closed(0.0):
            self._lost = self._lost or "the store's host has closed the connection"
        return bool(self._lost)


class StorePart:
    """The keys of a shared store that begin with a prefix, with the operations of torch's stores.

    Torch's ``PrefixStore`` only accepts its own stores.
    """

    def __init__(self, shared: SharedStore, prefix: str) -> None:
        self.shared = shared
        self.prefix = prefix

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        return functools.partial(self.shared.request, self.prefix, operation)


def under(store: AnyStore, prefix: str) -> AnyStore:
    """Return the part of a store in which all keys begin with a prefix."""
    if isinstance(store, StorePart):
        return StorePart(store.shared, f"{store.prefix}/{prefix}")
    return dist.PrefixStore(prefix, store)


class Clients:
    """Further connections to one store, each used by one thread at a time: torch waits in them.

    A ``TCPStore`` serves one thread at a time, even while that thread waits. Two threads that
    connect at the same time through one client, or through the user's, would wait for each other.

    One is kept for the next thread. Any others, needed while several threads connect, are closed
    afterwards: each costs the store's host a descriptor.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._free: deque[dist.Store] = deque(maxlen=1)
        self._latest: dict[int, int] = {}  # from ``connected``

    def take(self, store: dist.Store, lost_seconds: float) -> dist.Store:
        """Return a connection that no other thread uses until it is given back.

        If none is free, connecting blocks in C++ while the store's host is slow.

        Args:
            store: the store, with its prefix, to which to connect; the same in each call.
            lost_seconds: how long the store's host may be out of reach.

        Raises:
            DistNetworkError: the latest connection has closed, and so has the store.
        """
        if self._pid != os.getpid():  # a parent's connections belong to the parent
            self._pid = os.getpid()
            self._free.clear()
        # The one that is kept may have broken while unused, for example by an outage.
        with contextlib.suppress(IndexError, dist.DistNetworkError):
            kept = self._free.pop()
            kept.check([_NO_KEY])
            return kept
        if self._latest and all(has_closed(*each) for each in self._latest.items()):
            refuse_lost(store)
        own, self._latest, _ = _client(store, lost_seconds)
        return own

    def give_back(self, own: dist.Store) -> None:
        """Keep a connection for the next thread; not one that raised: an answer may still come."""
        self._free.append(own)

    @contextlib.contextmanager
    def lent(self, store: dist.Store, lost_seconds: float) -> Iterator[dist.Store]:
        """Take a connection, and give it back at the end of a block that does not raise."""
        own = self.take(store, lost_seconds)
        yield own
        self.give_back(own)


def _client(store: dist.Store, lost_seconds: float) -> tuple[dist.Store, dict[int, int], set[Any]]:
    """Connect to a store; return the connection, its sockets and the store's addresses.

    If it is not a ``TCPStore``, there are neither sockets nor addresses.
    """
    before = open_sockets()
    own: dist.Store = store.clone()  # type: ignore[attr-defined]  # not in torch's stubs
    if not isinstance(end := bare(own), dist.TCPStore):
        return own, {}, set()
    # It may be idle for hours, and a firewall may forget it meanwhile.
    notice_outages(before, lost_seconds, end.port)
    return own, connected(before, end.port), other_ends(before, end.port)


def refuse_lost(store: dist.Store) -> None:
    """Raise if nothing listens at the store's address: torch keeps trying for its limit, 5 minutes.

    An outage, which may pass, does not raise.
    """
    if isinstance(end := bare(store), dist.TCPStore):
        try:
            socket.create_connection((end.host, end.port), _TAKEN_WITHIN_SECONDS).close()
        except ConnectionRefusedError as error:
            raise dist.DistNetworkError(str(error)) from error
        except OSError:
            pass


R = TypeVar("R")

# Records about thousands of ranks are shorter. Decoded, a malicious record takes 75 times as much
# memory.
_RECORD_MAX_NBYTES = 4 << 20

_TEXT_ERRORS = "surrogatepass"  # call sites and messages may contain any text


def pack_record(record: Sequence[Any]) -> bytes:
    """Return a record as bytes; see ``unpack_record`` for its field types."""
    packed: bytes = msgpack.packb(record, default=dataclasses.astuple, unicode_errors=_TEXT_ERRORS)
    return packed


def unpack_record(raw: bytes, kind: type[R], what: str) -> R:
    """Return the record that was packed.

    Args:
        raw: the result of ``pack_record``.
        kind: the record's type. Its fields are numbers, text, bytes, members of an enum, other
            records or tuples of these, and may be optional. ``Annotated`` with a range restricts a
            number.
        what: the record's name, for errors.

    Raises:
        WireError: another program wrote it, a field does not match ``kind``, or it is too long.
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
    """Return a function that converts plain data to ``kind``, or raises ValueError or TypeError."""
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
    """Convert as many members as there are makers."""
    members = zip(makers, _exact(list, plain), strict=True)
    return kind(*[make(each) for make, each in members])
