"""``fail_together``: an error on one rank reaches the others wherever they wait."""

import contextlib
from collections.abc import Iterator
from types import TracebackType

from objcomm._algorithms import routes
from objcomm._calls.call import Call
from objcomm._calls.group import known_groups, resolve
from objcomm._config import GroupLike, Timeout
from objcomm._failures.verdict import Cause, Verdict, regions
from objcomm._observe.history import call_site
from objcomm._wire.failure_message import failure_of, on_rank, raise_together
from objcomm._wire.header import Operation, Status
from objcomm.errors import CollectiveError


class fail_together:  # noqa: N801  # used as a function, like contextlib's
    """A block that every rank leaves normally, or every rank leaves by an error.

    Every rank of ``group`` must enter it, in the same order as its other calls. An exception that
    escapes from the block on one rank is raised on all: also on ranks that wait in another
    operation, of this group or of another, and on those that wait for a third rank. At its end the
    ranks meet. A rank that computes hears of a failure in its next call, or at the end.

    No other library has this (see https://github.com/pytorch/pytorch/issues/122529). What waits in
    a collective of torch's own, or in an NCCL kernel, is not reached before that ends.

    Args:
        name: of this block, as that of a call in ``objcomm.broadcast``.
        group: who takes part: a process group, a one-dimensional device mesh, None for the world.
        timeout: for the first use of the group and for the meeting at the end: seconds or
            timedelta; the group's own if None.

    Raises:
        CollectiveError: the block failed on some rank. Every rank, within 2 s where it waits; from
            its own exception where it has one. A KeyboardInterrupt or SystemExit is raised itself
            on its own rank. Afterwards the group, and every group of its members, works.
        TransportTimeout: some ranks did not come to the end in time. Every rank that waited.
        ObjcommError: whatever else ``objcomm.barrier`` raises, on the same ranks.

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
    """The same for a block that is part of ``operation``, which errors show."""
    block = _Block(operation, name, group, timeout)
    try:
        yield
    except BaseException as error:
        block.end(error)
        raise
    block.end(None)


class _Block:
    """One entry into such a block on this rank; ``operation`` is what the user has called."""

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
            # Nobody waits for anybody at the beginning: another rank may have failed inside.
            told = self._verdict
            if told is not None and told.block and told.block not in regions.get():
                self._absolve_groups(told)
            raise
        if not self._key:
            return  # in a group of one nobody else fails
        told = self._enter()
        if told is not None:
            self._absolve_groups(told)
            raise told.error(self._called)
        regions.set((*regions.get(), self._key))

    # The block outlives a mesh whose end all ranks outlive, so each step asks for the one that is
    # in use by then. Each has returned before an error is raised, whose traceback would hold it.

    def _enter(self) -> Verdict | None:
        """Be in the block, unless another rank has failed in it and this one has heard."""
        mesh = self._group.mesh
        return None if mesh is None else mesh.enter(self._key)

    def _leave(self) -> None:
        """Be in the block no more."""
        mesh = self._group.mesh
        if mesh is not None:
            mesh.end_block(self._key)
        # Not by a token: generators leave blocks in any order, and in other contexts.
        regions.set(tuple(each for each in regions.get() if each != self._key))

    def _tell(self, verdict: Verdict) -> Verdict:
        """Tell all ranks in the block that this one failed; returns what all raise."""
        mesh = self._group.mesh
        return verdict if mesh is None else mesh.fail(self._key, verdict)

    @property
    def _verdict(self) -> Verdict | None:
        """What has ended the connections of all ranks, if anything has."""
        mesh = self._group.mesh
        return None if mesh is None else mesh.verdict

    @property
    def _failure(self) -> Verdict | None:
        """What some rank has told of this block, where its mesh has been replaced since."""
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
            # Nobody waits in the begin: what a rank has yet to hear of it hears inside, with those
            # that have entered before.
            raises_later=part == "begin",
        )

    def end(self, error: BaseException | None) -> None:
        """Meet the other ranks, or tell them of this rank's error."""
        try:
            if error is not None:
                self._fail(error)
            else:
                self._meet()
        finally:
            self._leave()

    def _meet(self) -> None:
        told = self._failure
        if told is not None:  # the block has caught what this rank was told
            self._end_groups(told)
            raise told.error(self._called)
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
            return  # the others have been told what broke it
        verdict = self._tell(
            Verdict.of(Cause.FAILED, failures=(failure,), operation=self._called, block=self._key)
        )
        self._end_groups(verdict)
        is_theirs = isinstance(error, CollectiveError) and error.operation == self._called
        if isinstance(error, Exception) and not is_theirs:
            raise on_rank(self._group.rank, verdict.error(self._called)) from error

    def _end_groups(self, verdict: Verdict | None) -> None:
        """Begin anew wherever no other ranks are joined: each of these leaves this block."""
        mesh = self._group.mesh
        if mesh is not None:
            mesh.leave(self._key)
        if verdict is not None:
            self._absolve_groups(verdict)

    def _absolve_groups(self, verdict: Verdict) -> None:
        for group in known_groups():
            group.absolve(verdict, self._group.ranks)
