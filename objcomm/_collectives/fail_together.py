"""``fail_together``: an error on one rank reaches the other ranks wherever they wait."""

import contextlib
from collections.abc import Iterator
from types import TracebackType

from objcomm._algorithms import routes
from objcomm._calls.call import Call
from objcomm._calls.group import known_groups, resolve
from objcomm._config import GroupLike, Timeout
from objcomm._failures.verdict import Cause, Verdict, open_blocks
from objcomm._observe.history import call_site
from objcomm._wire.failure_message import failure_of, on_rank, raise_together
from objcomm._wire.header import Operation, Status
from objcomm.errors import CollectiveError


class fail_together:  # noqa: N801  # used as a function, like contextlib's
    """A block that all ranks leave normally, or all leave with an error.

    Every rank of ``group`` must enter the block, in the same order as its other calls. If an
    exception escapes from the block on one rank, all ranks raise, including those waiting in
    another operation, of this group or another, and those waiting for a third rank. A rank that
    is computing raises in its next call, or at the end of the block, where all ranks meet.

    A rank that waits in one of torch's own collectives or in an NCCL kernel is not interrupted; it
    raises once that wait ends. Users have asked torch for such a block:
    <https://github.com/pytorch/pytorch/issues/122529>.

    Args:
        name: name of this block; see ``objcomm.broadcast``.
        group: process group or one-dimensional device mesh; None means the world.
        timeout: limit for the first use of the group and for the meeting at the end, in seconds or
            as a timedelta; None uses the group's timeout.

    Raises:
        CollectiveError: the block failed on some rank. Raised on every rank, within 2 s on a rank
            that is waiting, and chained to the rank's own exception if it has one. A rank whose
            own exception is KeyboardInterrupt or SystemExit raises that exception itself.
            Afterwards the group, and every group made of its members, still works.
        TransportTimeout: some ranks did not reach the end in time. Raised on every rank that was
            waiting.
        ObjcommError: any other error of ``objcomm.barrier``, on the same ranks.

    Examples:
        >>> import objcomm
        >>> with objcomm.fail_together():
        ...     shards = objcomm.all_gather("shard-0.parquet")
        >>> shards
        ['shard-0.parquet']
    """

    def __init__(self, *, name: str = "", group: GroupLike = None, timeout: Timeout = None) -> None:
        self._name = name
        self._group_like = group
        self._timeout = timeout
        self._blocks: list[_Block] = []

    def __enter__(self) -> None:
        self._blocks.append(
            _Block(Operation.FAIL_TOGETHER, self._name, self._group_like, self._timeout)
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._blocks.pop().end(error)


@contextlib.contextmanager
def failing_together(
    operation: Operation, group: GroupLike, timeout: Timeout, *, name: str = ""
) -> Iterator[None]:
    """A block like ``fail_together`` within ``operation``, which its errors name."""
    block = _Block(operation, name, group, timeout)
    try:
        yield
    except BaseException as error:
        block.end(error)
        raise
    block.end(None)


class _Block:
    """One entry into the block on this rank, for ``operation``, which the user called."""

    def __init__(
        self, operation: Operation, name: str, group_like: GroupLike, timeout: Timeout
    ) -> None:
        self._operation = operation
        self._called = operation.name.lower()
        self._name = name
        self._group_like = group_like
        self._timeout = timeout
        self._call_site = call_site()
        self._group = resolve(group_like, self._called)
        try:
            with self._call("begin") as call:
                self._key = call.place
        except CollectiveError:
            # The beginning does not synchronize ranks: another may already have failed inside.
            verdict = self._verdict
            if verdict is not None and verdict.block and verdict.block not in open_blocks.get():
                self._mark_groups_raised(verdict)
            raise
        if not self._key:
            return  # no other rank can fail in a group of one
        verdict = self._enter()
        if verdict is not None:
            self._mark_groups_raised(verdict)
            raise verdict.error(self._called)
        open_blocks.set((*open_blocks.get(), self._key))

    # The mesh may be replaced while the block is open, so each step looks up the current one. Each
    # returns before an error is raised, because the error's traceback would keep the mesh alive.

    def _enter(self) -> Verdict | None:
        """Enter the block, or return the verdict if this rank already knows that it failed."""
        mesh = self._group.mesh
        return None if mesh is None else mesh.enter(self._key)

    def _leave(self) -> None:
        mesh = self._group.mesh
        if mesh is not None:
            mesh.end_block(self._key)
        # Without a token: generators may leave blocks in any order, and in another context.
        open_blocks.set(tuple(each for each in open_blocks.get() if each != self._key))

    def _post_failure(self, verdict: Verdict) -> Verdict:
        """Report this rank's failure to all ranks in the block; return the error all will raise."""
        mesh = self._group.mesh
        return verdict if mesh is None else mesh.fail(self._key, verdict)

    @property
    def _verdict(self) -> Verdict | None:
        """The verdict that ended the connections of all ranks, if any."""
        mesh = self._group.mesh
        return None if mesh is None else mesh.verdict

    @property
    def _failure(self) -> Verdict | None:
        """The verdict posted for this block, if the mesh it was entered in has been replaced."""
        mesh = self._group.mesh
        is_same = mesh is None or (mesh.verdict is None and self._key.startswith(mesh.nonce))
        return None if mesh is None or is_same else mesh.failed(self._key)

    def _call(self, part: str) -> Call:
        return Call(
            self._operation,
            name=self._name,
            group=self._group_like,
            timeout=self._timeout,
            must_agree=part,
            # No rank waits in the begin call. A failure not yet raised on this rank is raised
            # inside the block, where the ranks that entered earlier raise it.
            raises_later=part == "begin",
        )

    def end(self, error: BaseException | None) -> None:
        """Meet the other ranks, or report this rank's error to them."""
        try:
            if error is not None:
                self._fail(error)
            else:
                self._meet()
        finally:
            self._leave()

    def _meet(self) -> None:
        verdict = self._failure
        if verdict is not None:  # the block caught the error that said so
            self._end_groups(verdict)
            raise verdict.error(self._called)
        try:
            with self._call("end") as call:
                if not call.is_alone:
                    with call.exchange as exchange:
                        routes.all_meet(exchange, call.announcement(Status.VALUE))
        except CollectiveError:
            self._end_groups(self._verdict)
            raise

    def _fail(self, error: BaseException) -> None:
        failure = failure_of(error, self._group.rank, self._call_site)
        if self._group.size == 1:
            raise_together(self._called, {0: failure}, error, 0)
            return
        if self._group.is_broken:
            return  # the other ranks know what broke it
        verdict = self._post_failure(
            Verdict.of(Cause.FAILED, failures=(failure,), operation=self._called, block=self._key)
        )
        self._end_groups(verdict)
        is_theirs = isinstance(error, CollectiveError) and error.operation == self._called
        if isinstance(error, Exception) and not is_theirs:
            raise on_rank(self._group.rank, verdict.error(self._called)) from error

    def _end_groups(self, verdict: Verdict | None) -> None:
        """Leave the block and reset every group that connects only ranks of this block."""
        mesh = self._group.mesh
        if mesh is not None:
            mesh.leave(self._key)
        if verdict is not None:
            self._mark_groups_raised(verdict)

    def _mark_groups_raised(self, verdict: Verdict) -> None:
        for group in known_groups():
            group.mark_raised(verdict, self._group.ranks)
