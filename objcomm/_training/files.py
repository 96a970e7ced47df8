"""``broadcast_file``: one rank's file or folder, on the disk of every host or in its memory.

One rank of each host takes part in the transfer, in which these ranks form a line. All ranks are in
one ``fail_together`` block meanwhile, so an error on one of them ends it on all.
"""

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, Unpack, overload

import torch

from objcomm._algorithms import routes, topology
from objcomm._algorithms.exchange import Exchange
from objcomm._algorithms.parts import copy
from objcomm._algorithms.transfers import Arriving, taken_out
from objcomm._calls.call import Call, plain_call
from objcomm._calls.group import resolve
from objcomm._codecs.buffers import (
    Buffer,
    BufferKind,
    allocate,
    empty,
    readable,
    view,
    without_memory,
    writable,
)
from objcomm._collectives.fail_together import failing_together
from objcomm._collectives.gather import decide_in
from objcomm._config import CallOptions, GroupLike, Timeout, WithSource, settings
from objcomm._observe.progress import Bar, bar_for
from objcomm._training.disk import (
    DIGEST_NBYTES,
    Copy,
    Listing,
    Part,
    Reader,
    digest_of,
    digest_of_start,
    is_listing,
    listed,
    nbytes_of,
    pieces,
)
from objcomm._transport.share import Share
from objcomm._transport.threads import SerialExecutor, carried_out
from objcomm._wire.failure_message import DisagreementError
from objcomm._wire.header import Operation, Status
from objcomm.errors import UsageError, WireError

T = TypeVar("T")

#: A piece, its bytes and their digest, and why this rank could not read them.
_Coming = tuple[Sequence[Part], torch.Tensor, BaseException | None]

PathLike = str | os.PathLike[str]

_OPERATION = Operation.BROADCAST_FILE
_CALLED = _OPERATION.name.lower()

# Hosts in a line pass on whole pieces, so each is one piece behind the host before it.
_PIECE_NBYTES = 2 << 20
# A rank that has failed still passes on the other pieces of a stretch, and then raises.
_PIECES_OF_A_STRETCH = 128
# So a piece can be sent as soon as the one before has been.
_RECEIVES_AHEAD = 4

# In place of the digest of a piece that the source could not read. Not zeros, which failing memory
# or a failing network card may leave.
_NO_DIGEST = digest_of(memoryview(b"a piece that the source could not read"))


class FileOptions(CallOptions, WithSource, total=False):
    """The keywords of ``broadcast_file``."""

    progress: bool


@overload
def broadcast_file(
    path: PathLike | None,
    to: None = None,
    src: int | None = None,
    **options: Unpack[FileOptions],
) -> Any: ...
@overload
def broadcast_file(
    path: PathLike | None,
    to: PathLike,
    src: int | None = None,
    **options: Unpack[FileOptions],
) -> Path: ...
def broadcast_file(
    path: PathLike | None,
    to: PathLike | None = None,
    src: int | None = None,
    *,
    group_src: int | None = None,
    name: str = "",
    group: GroupLike = None,
    timeout: Timeout = None,
    progress: bool = False,
) -> Path | memoryview | dict[str, memoryview]:
    """Copy one rank's file or folder to every host: to its disk, or to memory that its ranks share.

    Every rank of ``group`` must call this. The source reads everything once, and each host receives
    it once, because each host passes on what it receives to the next. Hosts are distinguished as in
    ``objcomm.node_group``. Every host checks a digest of each piece.

    With ``to``, one rank of each host writes the copy under a temporary name in the same folder
    (``.NAME.objcomm-partial``), waits for the disk, and renames it once all hosts have everything,
    so nothing incomplete is ever at ``to``. After an error the temporary copy stays. The next call
    with the same ``to`` continues each file that, by its digest, begins with the same bytes on all
    hosts and the source. The copy is removed only on a host whose disk has failed or is full.

    A copied file replaces a file at ``to``, and a copied folder an empty folder; any other
    combination is an error. Permissions are copied, but not owners and times; a copied folder is
    always writable by its owner. Links are followed.

    Args:
        path: the file or folder, on the source. Ignored on other ranks, which may pass ``None``.
        to: the name of the copy, the same on all ranks of a host; hosts that share a disk need
            different names. Missing parent folders are created. If it is the source's own
            ``path``, that is left alone. None copies to memory; either all ranks pass None, or
            none does.
        src: global rank of the source.
        group_src: the source as a rank within the group, instead of ``src``. With neither, the
            group's first rank is the source.
        name: name of this call; see ``objcomm.broadcast``.
        group: process group or one-dimensional device mesh; None means the world.
        timeout: for the whole transfer, seconds or timedelta; None uses the group's timeout.
        progress: show a progress bar on the source if the transfer takes more than half a second.
            Pass it on every rank. Requires tqdm.

    Returns:
        With ``to``, its path. Otherwise, for a file, a read-only memoryview of its content, which
        is in the host's memory once (over Gloo, once for each rank); for a folder, a dict with such
        a view of each file, by its path within the folder, with ``/`` between names.

    Raises:
        UsageError: an argument is invalid. Raised on each rank that passed it, before any traffic.
        NotInGroupError: this rank is not a member of ``group``.
        MissingDependencyError: ``progress`` is set and tqdm is not installed. Raised on each rank
            without tqdm, before any traffic.
        CollectiveError: a rank could not read or write, received something other than was sent, or
            passed a different ``to`` than its host's first rank. Raised on every rank, with that
            rank's own error, such as the OSError of a full disk. Later calls work.
        DesyncError: ranks are in different operations, or in calls with different names, or only
            some passed ``to``. Raised once on every rank: where it waits, or in its next call.
        TransportTimeout: the timeout expired. Raised on every rank that was still waiting.
        TransportError: a rank died. Raised on every rank.

    Examples:
        >>> import objcomm, pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "weights.bin")
        >>> _ = path.write_bytes(b"0123")
        >>> objcomm.broadcast_file(path, path.with_name("copy.bin")).read_bytes()
        b'0123'
        >>> objcomm.broadcast_file(path).tolist()
        [48, 49, 50, 51]
    """
    for argument, given in (("path", path), ("to", to)):
        if not isinstance(given, str | os.PathLike | None):
            raise UsageError(
                f"{_CALLED}: {argument}={given!r} must be the path of a file or folder"
            )
    if to is not None and not Path(to).name:
        raise UsageError(
            f"{_CALLED}: to={os.fspath(to)!r} does not end in a name; pass the name of the copy"
        )
    whole = resolve(group, _CALLED)
    deadline = whole.deadline(_CALLED, timeout)
    root = whole.root(_CALLED, src, group_src)
    bar = bar_for(_CALLED, (whole.rank - root) % whole.size) if progress else None

    def begin(among: Any, step: str, root: int | None = None, *, confirm: bool = False) -> Call:
        return plain_call(
            _OPERATION,
            name=name,
            group=among,
            # Errors of the first call show the limit as it was given.
            timeout=deadline.seconds if confirm else deadline.seconds_left,
            group_root=root,
            has_root=root is not None,
            must_agree=step,
            confirm=confirm,
        )

    step = "list for memory" if to is None else "list for disk"
    listing, hosts = _announced(begin(group, step, root, confirm=True), path, to)
    if to is not None and len(set(hosts)) < whole.size:
        _name_one_copy(begin(group, "names"), to, hosts)
    firsts = topology.firsts(hosts, root)
    own = firsts[hosts[whole.rank]]
    beside = [rank for rank, host in enumerate(hosts) if firsts[host] == own != rank]
    with failing_together(_OPERATION, group, deadline.seconds_left, name=name), ExitStack() as ends:
        target: Copy | _InMemory | None = None
        if whole.rank == own:
            top = Path(path) if path is not None and whole.rank == root else None
            if to is None:
                target = _InMemory(listing, is_shared=bool(beside))
            elif top is None or not (Path(to).exists() and top.samefile(to)):
                target = Copy(Path(to), listing)
            members = tuple(sorted(firsts.values()))
            part = whole if len(members) == whole.size else whole.part(members)
            begin_among = partial(begin, part)
            first = _First(begin_among, members.index(root), part.size, listing, top, target, bar)
            first.transfer(ends)
        if to is not None:
            return Path(to)
        return _handed_out(begin(group, "share"), own, beside, listing, target)


def _announced(
    call: Call, path: PathLike | None, to: PathLike | None
) -> tuple[Listing, tuple[int, ...]]:
    """Return the source's listing on every rank, and the host number of each rank.

    If the ranks of a host need shared memory but have none, each counts as a host.
    """
    own: list[Listing] = []

    def read(path: PathLike | None) -> list[Any]:
        own.append(_listed(path, to))
        return [*own[0]]

    def accepted() -> Listing:
        if own:
            return own[0]
        plain = call.decode_as(message, is_listing, "a list of files")
        listing, most = Listing(*plain), settings().max_operation_nbytes
        if to is None and listing.nbytes > most:
            raise WireError(
                f"files of {listing.nbytes} bytes are more than the limit of {most}; see "
                "objcomm.configure(max_operation_nbytes=), or pass to= to put them on a disk"
            )
        return listing

    with call:
        if call.is_alone:
            return call.alone(partial(_listed, path, to)), (0,)
        mine = call.message(path, read) if call.is_root else None
        with call.exchange as exchange:
            message = routes.broadcast(exchange, mine, call.root)
        is_by_host = to is not None or exchange.shares_memory
        hosts = exchange.hosts if is_by_host else tuple(range(exchange.size))
        return call.result([message], accepted), hosts


def _listed(path: PathLike | None, to: PathLike | None) -> Listing:
    """List what the source copies.

    Raises:
        UsageError: there is no path, or the copy would be part of what is copied.
        OSError: it can't be read.
    """
    if path is None or not os.fspath(path):  # an empty one would be the current folder
        raise UsageError(
            f"{_CALLED}: the source passed path={path!r}; pass the file or folder to copy"
        )
    listing = listed(Path(path))
    if to is not None and Path(path).resolve() in Path(to).resolve().parents:
        raise UsageError(
            f"{_CALLED}: to={os.fspath(to)!r} is inside the folder path={os.fspath(path)!r}; "
            "copy it to another folder"
        )
    return listing


def _name_one_copy(call: Call, to: PathLike, hosts: Sequence[int]) -> None:
    """Raise on all ranks if the ranks of a host name different copies: only one of them writes."""

    def compare(names: list[str]) -> None:
        first: dict[int, int] = {}
        reasons = {}
        for rank, (host, name) in enumerate(zip(hosts, names, strict=True)):
            usual = first.setdefault(host, rank)
            if name != names[usual]:
                reasons[rank] = (
                    f"to={name!r} must be the same on all ranks of a host, and is "
                    f"{names[usual]!r} on rank {usual}"
                )
        if reasons:
            raise DisagreementError(reasons)

    with call:
        decide_in(
            call,
            lambda: os.path.realpath(to),  # ranks may be in different folders
            compare,
            is_part=lambda plain: type(plain) is str,
            is_answer=lambda plain: plain is None,
        )()


class _InMemory:
    """A copy in memory, which other ranks of this host may map.

    Attributes:
        share: the memory; None if this rank alone uses it, or the system has no such memory.
        buffers: each file that is not empty, once the copy is finished.
    """

    def __init__(self, listing: Listing, *, is_shared: bool) -> None:
        """Allocate memory.

        Args:
            listing: what is copied.
            is_shared: whether other ranks of this host need it.
        """
        files = [file for file, size in enumerate(listing.sizes) if size > 0]
        sizes = [listing.sizes[file] for file in files]
        self.share: Share | None = None
        if is_shared:
            with suppress(OSError):  # no memory left, or the system refuses such files
                self.share = Share.with_room(sizes)
        if self.share is None:
            self.buffers = [allocate(BufferKind.MEMORY, size) for size in sizes]
            flats = [each.flat for each in self.buffers]
        else:
            self.buffers, flats = _unfilled(listing), self.share.flats
        self._kept = [0] * len(listing.sizes)
        self._flats = dict(zip(files, flats, strict=True))

    def begin(self) -> list[int]:
        """Return how much of each file there is: nothing."""
        return self._kept

    def write(self, piece: Sequence[Part], content: memoryview) -> None:
        """Copy a piece to its place."""
        at = 0
        for file, start, nbytes in piece:
            copy(view(content[at : at + nbytes]), self._flats[file][start : start + nbytes])
            at += nbytes

    def finish(self) -> None:
        """Make the copy immutable."""
        self._flats.clear()
        if self.share is not None:
            self.share.seal()
            self.buffers = taken_out(self.buffers, self.share)

    def publish(self) -> None:
        """Do nothing: the ranks get the copy in another call."""

    def close(self) -> None:
        """Close the descriptors; mapped memory remains."""
        if self.share is not None:
            self.share.close()


def _unfilled(listing: Listing) -> list[Buffer]:
    """Return a buffer for each file that is not empty, to be mapped."""
    return [without_memory(BufferKind.MEMORY, size) for size in listing.sizes if size > 0]


def _handed_out(
    call: Call,
    own: int,
    beside: Sequence[int],
    listing: Listing,
    memory: Copy | _InMemory | None,
) -> memoryview | dict[str, memoryview]:
    """Return views of the files on every rank.

    Args:
        call: the call.
        own: the rank that has this host's copy.
        beside: the other ranks on this host.
        listing: what was copied.
        memory: the copy, on the rank that has it.
    """
    with call:
        if call.is_alone and isinstance(memory, _InMemory):
            buffers = memory.buffers
        else:
            with call.exchange as exchange:
                if isinstance(memory, _InMemory):
                    buffers = memory.buffers
                    exchange.share([each.flat for each in buffers], beside, memory.share)
                else:
                    buffers = exchange.lent(exchange.borrow(_unfilled(listing), own))
    found = iter(buffers)
    views = {
        name: memoryview(next(found).owner).toreadonly() if size else memoryview(b"")
        for name, size in zip(listing.names, listing.sizes, strict=True)
        if size >= 0
    }
    return views if listing.is_folder else views[""]


class _First:
    """One transfer, as seen by a rank that is the first of its host."""

    def __init__(  # noqa: PLR0917  # each has its own type
        self,
        begin: Callable[..., Call],
        root: int,
        size: int,
        listing: Listing,
        top: Path | None,
        target: Copy | _InMemory | None,
        bar: Bar | None,
    ) -> None:
        """Prepare a transfer.

        Args:
            begin: begins a call among these ranks; takes the name of a step, and a root.
            root: the source, among these ranks.
            size: number of these ranks.
            listing: what is copied.
            top: the path of what is copied, on the source.
            target: this host's copy; None if the source's own files serve as one.
            bar: shows the progress.
        """
        self._begin = begin
        self._root, self._size = root, size
        self._listing = listing
        self._top, self._target, self._bar = top, target, bar
        self._line = SerialExecutor(f"objcomm-{_CALLED}")
        self._buffers: list[torch.Tensor] = []

    def transfer(self, ends: ExitStack) -> None:
        """Move everything, and return when it is in place on each host.

        Args:
            ends: closes what is opened here.
        """
        listing, target, bar = self._listing, self._target, self._bar
        if target is None and self._size == 1:
            return
        for each in (bar, target):
            if each is not None:
                ends.callback(each.close)
        reader = None
        if self._top is not None:
            reader = Reader(self._top, listing)  # before the digests of what the hosts have already
            ends.callback(reader.close)
        starts = self._starts()
        # When a piece is taken, the one before it is still being sent and written.
        nbytes = min(_PIECE_NBYTES, listing.nbytes) + DIGEST_NBYTES
        self._buffers = [empty(nbytes) for _ in range(_RECEIVES_AHEAD + 2)]
        if bar is not None:
            bar.expect(listing.nbytes - sum(starts))
        ends.callback(self._line.drain)  # before the files are closed
        self._stream(pieces(listing.sizes, starts, _PIECE_NBYTES), reader)
        if target is not None:
            target.finish()
        with self._begin("finish") as call:
            if not call.is_alone:
                with call.exchange as exchange:
                    routes.all_meet(exchange, call.announcement(Status.VALUE))
        if target is not None:
            target.publish()

    def _starts(self) -> list[int]:
        """Return, for each file, how many bytes all hosts already have."""
        listing, target = self._listing, self._target
        has = [max(0, size) for size in listing.sizes] if target is None else target.begin()

        def are_lengths(plain: Any) -> bool:
            return _is_list_of(int, len(has), plain) and all(
                0 <= each <= max(0, size) for each, size in zip(plain, listing.sizes, strict=True)
            )

        def least(parts: list[list[int]]) -> list[int]:
            return [min(each) for each in zip(*parts, strict=True)]

        with self._begin("lengths") as call:
            starts = decide_in(
                call, lambda: has, least, is_part=are_lengths, is_answer=are_lengths
            )()
        files = [file for file, start in enumerate(starts) if start]
        if not files:
            return starts
        tops = [self._top] if self._top is not None else []
        if isinstance(target, Copy):
            tops.append(target.path)

        # Before the call, so that a disk's error is raised as that of this rank.
        digests = []
        for file in files:
            name, start = listing.names[file], starts[file]
            here = {digest_of_start(each / name, start) for each in tops}
            digests.append(here.pop() if len(here) == 1 else b"")

        def equal(parts: list[list[bytes]]) -> list[bool]:
            return [len(set(each)) == 1 and each[0] != b"" for each in zip(*parts, strict=True)]

        with self._begin("digests") as call:
            are_equal = decide_in(
                call,
                lambda: digests,
                equal,
                is_part=partial(_is_list_of, bytes, len(files)),
                is_answer=partial(_is_list_of, bool, len(files)),
            )()
        for file, is_equal in zip(files, are_equal, strict=True):
            starts[file] *= is_equal
        return starts

    def _stream(self, plan: Iterator[list[Part]], reader: Reader | None) -> None:
        """Move all pieces from host to host, and raise this rank's error, if there is one.

        Args:
            plan: the pieces.
            reader: reads them, on the source.
        """
        while stretch := list(itertools.islice(plan, _PIECES_OF_A_STRETCH)):
            with self._begin("stretch", self._root) as call:
                if call.is_alone:
                    error = self._move(None, stretch, reader)
                else:
                    with call.exchange as exchange:
                        error = self._move(exchange, stretch, reader)
            # Not in the traffic: other ranks of this part would report it as their own.
            if error is not None:
                raise error

    def _move(
        self, exchange: Exchange | None, stretch: Sequence[list[Part]], reader: Reader | None
    ) -> BaseException | None:
        """Move some pieces; while one travels, the next is read and the previous one is written.

        Args:
            exchange: the traffic; None without other hosts.
            stretch: the pieces.
            reader: reads them, on the source.

        Returns:
            This rank's error, if there is one. It has passed on all pieces even so.
        """
        parent, children = None, list[int]()
        if exchange is not None:
            parent, children = topology.line(exchange.rank, self._root, self._size)
        if exchange is None or parent is None:
            coming = self._read(stretch, reader)
        else:
            coming = self._received(exchange, stretch, parent)
        target, error, writing = self._target, None, None
        for piece, flat, failure in coming:
            for child in children:
                if exchange is not None:
                    exchange.hand_over()  # so that no more than one piece is kept for it
                    exchange.send_flat(flat, child, is_ended=True)
            error = error or failure
            if self._bar is not None:
                self._bar.moved(nbytes_of(piece))
            if writing is not None:
                error, writing = error or writing.exception(), None
            if error is None and target is not None:
                writing = self._begun(
                    partial(_write, target, piece, flat, is_checked=parent is not None)
                )
        return error or (None if writing is None else writing.exception())

    def _room(self, at: int, piece: Sequence[Part]) -> torch.Tensor:
        """Return memory for the piece at a position; it is used again for a later one."""
        # New memory for each piece was not reused: after 24 MiB the process was 24 MiB larger.
        return self._buffers[at % len(self._buffers)][: nbytes_of(piece) + DIGEST_NBYTES]

    def _read(self, stretch: Sequence[list[Part]], reader: Reader | None) -> Iterator[_Coming]:
        """Read pieces on the source, one ahead."""
        error: BaseException | None = None
        reading: deque[Future[None]] = deque()
        for at, piece in enumerate(stretch):
            for ahead in range(at + len(reading), min(at + 2, len(stretch))):
                if reader is not None:
                    flat = self._room(ahead, stretch[ahead])
                    reading.append(self._begun(partial(_read, reader, stretch[ahead], flat)))
            flat, error = self._room(at, piece), error or reading.popleft().exception()
            if error is not None:
                flat.zero_()
                writable(flat)[-DIGEST_NBYTES:] = _NO_DIGEST
            yield piece, flat, error

    def _received(
        self, exchange: Exchange, stretch: Sequence[list[Part]], parent: int
    ) -> Iterator[_Coming]:
        """Receive pieces from another host."""
        posted: deque[Arriving] = deque()
        for at, piece in enumerate(stretch):
            for ahead in range(at + len(posted), min(at + _RECEIVES_AHEAD, len(stretch))):
                flat = self._room(ahead, stretch[ahead])
                posted.append(exchange.arriving(flat, parent, is_ended=True))
            yield piece, posted.popleft().wait(parent), None

    def _begun(self, job: Callable[[], T]) -> Future[T]:
        outcome: Future[T] = Future()
        self._line.submit(partial(carried_out, job, outcome))
        return outcome


def _read(reader: Reader, piece: Sequence[Part], into: torch.Tensor) -> None:
    """Read a piece on the source, and add its digest."""
    content = writable(into)
    reader.read(piece, content[:-DIGEST_NBYTES])
    content[-DIGEST_NBYTES:] = digest_of(content[:-DIGEST_NBYTES])


def _write(
    target: Copy | _InMemory, piece: Sequence[Part], flat: torch.Tensor, *, is_checked: bool
) -> None:
    """Check a piece if it has traveled, and write it.

    Raises:
        WireError: it is not what the source has read.
        OSError: the disk is full, or has failed.
    """
    received = memoryview(readable(flat))
    content, digest = received[:-DIGEST_NBYTES], bytes(received[-DIGEST_NBYTES:])
    if digest == _NO_DIGEST:
        return  # the source raises the reason
    if is_checked and digest_of(content) != digest:
        raise WireError("a piece of a file has another digest than its source sent")
    target.write(piece, content)


def _is_list_of(kind: type, count: int, plain: object) -> bool:
    return type(plain) is list and [type(each) for each in plain] == [kind] * count
