"""The object collectives of ``torch.distributed``, with its names, signatures and lists.

Only the import changes: ``from objcomm.compat import torch as dist_objects``.

As in torch, ranks are global unless the argument begins with ``group_``, and the default root is
global rank 0. A rank outside of ``group`` gets torch's warning, and nothing else happens there.
Without ``init_process_group``, the functions work in a world of one. Received objects are
independent copies; tensors on a device arrive on the receiver's current device. ``device`` and
``use_batch``, which say where and how torch stages bytes, are accepted and have no effect. Objects
are always encoded with the pickle codec, whatever ``objcomm.configure`` sets. With
``weights_only=True``, new in torch 2.15, a rank admits builtin types, tensors, arrays, and
everything passed to its ``torch.serialization.add_safe_globals``; a message that names anything
else raises ``ForbiddenTypeError``. An error for a wrong argument, or for an object that can't be
pickled, can also be caught as the class that torch raises, such as ``IndexError``.

As in torch, any thread may call these functions. The calls of the main thread form one sequence,
and those of all other threads a second one, in which the threads take turns. So a call must come
from the main thread on all ranks or on none. A thread in ``objcomm.lane`` uses that lane's
sequence.
"""

import warnings
from collections.abc import Callable, MutableSequence, Sequence
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.serialization import get_safe_globals

from objcomm._calls.call import Call
from objcomm._calls.group import Group, resolve
from objcomm._collectives.broadcast import broadcast_in
from objcomm._collectives.gather import all_gather_in, gather_in
from objcomm._collectives.scatter import one_each, scatter_in
from objcomm._config import GroupLike, whole_number
from objcomm._observe.published import folded
from objcomm._observe.tracing import keep_eager
from objcomm._p2p.call import P2PCall, Receive, Send
from objcomm._wire.header import Operation
from objcomm._world import is_reachable, rank
from objcomm.compat.patching import Patch, Switch
from objcomm.compat.raising import builtin_base, raised_in, raising
from objcomm.errors import (
    CollectiveError,
    EncodeError,
    NotInGroupError,
    ObjcommError,
    UsageError,
    caught_as,
)

__all__ = [
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "patch",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
]

E = TypeVar("E", bound=P2PCall)
T = TypeVar("T")
P = ParamSpec("P")

_CODEC = "pickle"

# A separate tag, so that lists do not match messages that the program sends with ``objcomm.send``.
_TAG = (1 << 32) - 1

#: The classes that torch raises for wrong arguments, by the type names in other ranks' failures.
_TORCHS = {each.__name__: each for each in (ValueError, TypeError, IndexError, RuntimeError)}
_TORCHS[f"{UsageError.__module__}.{UsageError.__qualname__}"] = ValueError


def _as_torch_raises(error: ObjcommError) -> ObjcommError:
    """Make a failure of one rank's arguments or object catchable as the class that torch raises.

    On the other ranks the failing rank's message becomes the cause. If an object can't be pickled,
    only the failing rank knows the class that pickle raised.
    """
    if not isinstance(error, CollectiveError):
        return error
    failing = min(error.failures) if error.own_rank not in error.failures else error.own_rank
    failure, cause = error.failures[failing], error.__cause__
    if isinstance(cause, EncodeError):
        refused = builtin_base(raised_in(cause))
        return error if refused is None else caught_as(error, refused)
    kind = _TORCHS.get(failure.type_name)
    if kind is None:
        return error
    if cause is None:
        error.__cause__ = caught_as(UsageError(failure.message), kind)
    return caught_as(error, kind)


def _in_torchs_place(outside: T) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function to raise torch's errors, and to warn on a rank outside of the group.

    Args:
        outside: the result on a rank outside of the group.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        call = raising(_as_torch_raises)(function)

        def called(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return call(*args, **kwargs)
            except NotInGroupError:
                warnings.warn(
                    f"Running {function.__name__} on global rank {rank()} which does not belong to "
                    "the given group.",
                    stacklevel=3,  # the caller of the function that ``folded`` returns
                )
                return outside

        keep_eager([function])
        return folded(called, like=function)

    return decorate


@_in_torchs_place(None)
def broadcast_object_list(  # noqa: PLR0917  # torch's signature
    object_list: MutableSequence[Any],
    src: int | None = None,
    group: GroupLike = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    weights_only: bool = False,  # noqa: FBT001, FBT002  # torch's signature
) -> None:
    """Broadcast the objects of one rank's list into the lists of all ranks.

    Every rank of ``group`` must call this.

    Args:
        object_list: on the source, the objects to share, which are not changed; elsewhere a list of
            the same length, whose entries are replaced.
        src: global rank of the source; defaults to 0.
        group: the participating ranks: a process group or a one-dimensional device mesh; defaults
            to the world.
        device: has no effect.
        group_src: rank of the source within the group, as an alternative to ``src``.
        weights_only: whether received pickles may name only what torch considers safe; see the
            description of this module.

    Raises:
        UsageError: the source is given twice or is not in the group; raised on every rank, before
            any traffic. Or this rank's list is not as long as the source's; raised on this rank,
            whose list is unchanged. Later calls work.
        CollectiveError: the source's ``object_list`` is not a list, or could not be encoded. Raised
            on every rank.
        ObjcommError: whatever else ``objcomm.broadcast`` raises, on the same ranks.

    Examples:
        >>> from objcomm.compat import torch as dist_objects
        >>> objects = [{"lr": 0.1}, "adam"]
        >>> dist_objects.broadcast_object_list(objects, src=0)
        >>> objects
        [{'lr': 0.1}, 'adam']
    """
    del device
    name = "broadcast_object_list"
    root = src, group_src
    joined: Any = resolve(group, name)
    with joined.in_turns(), _call(Operation.BROADCAST, name, joined, root, weights_only) as call:
        # A plain list, whatever sequence was given.
        objects = broadcast_in(call, object_list, lambda given: list(_entries(name, given)))()
        if not call.is_root:
            _replace_all(name, call.root, object_list, objects)


@_in_torchs_place(None)
def all_gather_object(
    object_list: MutableSequence[Any],
    obj: object,
    group: GroupLike = None,
    weights_only: bool = False,  # noqa: FBT001, FBT002  # torch's signature
) -> None:
    """Gather one object from every rank into the lists of all ranks.

    Every rank of ``group`` must call this. Objects are not padded to one size.

    Args:
        object_list: a list with at least one entry per rank. Its first entries are replaced by the
            ranks' objects, in group rank order; this rank's own object is copied too.
        obj: this rank's contribution.
        group: the participating ranks: a process group or a one-dimensional device mesh; defaults
            to the world.
        weights_only: whether received pickles may name only what torch considers safe; see the
            description of this module.

    Raises:
        UsageError: ``group`` is not a group. Raised on every rank that passed it, before any
            traffic.
        CollectiveError: some rank's list is too short, or its object could not be encoded. Raised
            on every rank, before any object has moved; no list is changed.
        ObjcommError: whatever else ``objcomm.all_gather`` raises, on the same ranks.

    Examples:
        >>> from objcomm.compat import torch as dist_objects
        >>> gathered = [None]
        >>> dist_objects.all_gather_object(gathered, "shard-0.parquet")
        >>> gathered
        ['shard-0.parquet']
    """
    name = "all_gather_object"
    joined: Any = resolve(group, name)
    with joined.in_turns(), _call(Operation.ALL_GATHER, name, joined, None, weights_only) as call:

        def check(mine: object) -> object:
            _check_room(call, object_list)
            return mine

        objects = all_gather_in(call, obj, check)()
        objects[call.rank] = _copied(call, obj)
        _replace(object_list, objects)


@_in_torchs_place(None)
def gather_object(  # noqa: PLR0917  # torch's signature
    obj: object,
    object_gather_list: MutableSequence[Any] | None = None,
    dst: int | None = None,
    group: GroupLike = None,
    group_dst: int | None = None,
    weights_only: bool = False,  # noqa: FBT001, FBT002  # torch's signature
) -> None:
    """Gather one object from every rank into one rank's list.

    Every rank of ``group`` must call this. Objects are not padded to one size, and are sent to the
    destination only.

    Args:
        obj: this rank's contribution.
        object_gather_list: on the destination, a list with at least one entry per rank. Its first
            entries are replaced by the ranks' objects, in group rank order; this rank's own object
            is copied too. Elsewhere None or an empty list.
        dst: global rank of the destination; defaults to 0.
        group: the participating ranks: a process group or a one-dimensional device mesh; defaults
            to the world.
        group_dst: rank of the destination within the group, as an alternative to ``dst``.
        weights_only: whether received pickles may name only what torch considers safe; see the
            description of this module.

    Raises:
        UsageError: the destination is given twice or is not in the group. Raised on every rank,
            before any traffic.
        CollectiveError: the destination's list is too short or missing, another rank passed a list,
            or an object could not be encoded. Raised on the destination and that rank, before the
            list changes.
        ObjcommError: whatever else ``objcomm.gather`` raises, on the same ranks.

    Examples:
        >>> from objcomm.compat import torch as dist_objects
        >>> gathered = [None]
        >>> dist_objects.gather_object({"correct": 41}, gathered, dst=0)
        >>> gathered
        [{'correct': 41}]
    """
    name = "gather_object"
    root = dst, group_dst
    joined: Any = resolve(group, name)
    with joined.in_turns(), _call(Operation.GATHER, name, joined, root, weights_only) as call:

        def check(obj: object) -> object:
            _check_gather_list(call, object_gather_list)
            return obj

        objects = gather_in(call, obj, check)()
        if objects is not None and object_gather_list is not None:
            objects[call.rank] = _copied(call, obj)
            _replace(object_gather_list, objects)


@_in_torchs_place(None)
def scatter_object_list(  # noqa: PLR0917  # torch's signature
    scatter_object_output_list: MutableSequence[Any],
    scatter_object_input_list: Sequence[Any] | None = None,
    src: int | None = None,
    group: GroupLike = None,
    group_src: int | None = None,
    weights_only: bool = False,  # noqa: FBT001, FBT002  # torch's signature
) -> None:
    """Scatter the objects of the source's list, one to each rank.

    Every rank of ``group`` must call this. Each object is sent to its own rank only.

    Args:
        scatter_object_output_list: a list whose first entry is replaced by this rank's object; on
            the source that is a copy too.
        scatter_object_input_list: on the source, one object per rank, in group rank order; ignored
            elsewhere.
        src: global rank of the source; defaults to 0.
        group: the participating ranks: a process group or a one-dimensional device mesh; defaults
            to the world.
        group_src: rank of the source within the group, as an alternative to ``src``.
        weights_only: whether received pickles may name only what torch considers safe; see the
            description of this module.

    Raises:
        UsageError: the source is given twice or is not in the group; raised on every rank, before
            any traffic. Or the output list of a rank other than the source is not a list or is
            empty; raised on that rank after it has received its object. Later calls work.
        CollectiveError: the source did not pass one object per rank, passed an empty output list,
            or could not encode an object. Raised on every rank, before any object has moved.
        ObjcommError: whatever else ``objcomm.scatter`` raises, on the same ranks.

    Examples:
        >>> from objcomm.compat import torch as dist_objects
        >>> mine = [None]
        >>> dist_objects.scatter_object_list(mine, [{"files": ["a", "b"]}], src=0)
        >>> mine
        [{'files': ['a', 'b']}]
    """
    name = "scatter_object_list"
    root = src, group_src
    joined: Any = resolve(group, name)
    with joined.in_turns(), _call(Operation.SCATTER, name, joined, root, weights_only) as call:

        def produce() -> list[Any]:
            _check_output(name, scatter_object_output_list)
            given = scatter_object_input_list
            objects = _one_each(call, None if given is None else _entries(name, given))
            objects[call.rank] = call.copy(objects[call.rank])  # not encoded, so this may fail
            return objects

        obj = scatter_in(call, produce)()
        if not call.is_root:
            _check_output(name, scatter_object_output_list)
        scatter_object_output_list[0] = obj


@_in_torchs_place(None)
def send_object_list(  # noqa: PLR0917  # torch's signature
    object_list: Sequence[Any],
    dst: int | None = None,
    group: GroupLike = None,
    device: torch.device | None = None,
    group_dst: int | None = None,
    use_batch: bool = False,  # noqa: FBT001, FBT002  # torch's signature
    weights_only: bool = False,  # noqa: FBT001, FBT002  # torch's signature
) -> None:
    """Send the objects of a list to one rank, which calls ``recv_object_list``.

    Only these two ranks participate. The list is sent as one message. Any thread may send.

    Args:
        object_list: the objects to send.
        dst: global rank of the receiver.
        group: a group that contains both ranks; defaults to the world.
        device: has no effect.
        group_dst: rank of the receiver within the group, as an alternative to ``dst``.
        use_batch: has no effect.
        weights_only: has no effect here; pass it to ``recv_object_list``.

    Raises:
        UsageError: the receiver is missing, given twice, not in the group, or this rank itself;
            or ``object_list`` is not a list. Raised on this rank, before any traffic.
        CollectiveError: an object could not be encoded. Raised on both ranks.
        ObjcommError: whatever else ``objcomm.send`` raises, on the same ranks.

    Examples:
        >>> from objcomm.compat import torch as dist_objects
        >>> dist_objects.send_object_list(["to myself"], dst=0)
        Traceback (most recent call last):
        objcomm.UsageError: send_object_list: rank 0 is this rank itself; name another one
    """
    del device, use_batch, weights_only
    name = "send_object_list"
    _p2p_call(Send, name, group, dst, group_dst).run(list(_entries(name, object_list)))


@_in_torchs_place(-1)
def recv_object_list(  # noqa: PLR0917  # torch's signature
    object_list: MutableSequence[Any],
    src: int | None = None,
    group: GroupLike = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    use_batch: bool = False,  # noqa: FBT001, FBT002  # torch's signature
    weights_only: bool = False,  # noqa: FBT001, FBT002  # torch's signature
) -> int:
    """Receive the objects of a list that one rank sends with ``send_object_list``.

    Any thread may receive.

    Args:
        object_list: a list as long as the sender's; its entries are replaced.
        src: global rank of the sender; defaults to any rank.
        group: a group that contains both ranks; defaults to the world.
        device: has no effect.
        group_src: rank of the sender within the group, as an alternative to ``src``.
        use_batch: has no effect.
        weights_only: whether received pickles may name only what torch considers safe; see the
            description of this module.

    Returns:
        The sender's global rank; -1 on a rank outside of ``group``.

    Raises:
        UsageError: the sender is given twice, not in the group, or this rank itself, or
            ``object_list`` is not a list; raised on this rank, before any traffic. Or the list is
            not as long as the sender's; raised on this rank, with the message consumed and the list
            unchanged.
        CollectiveError: the sender could not encode an object. Raised on both ranks.
        ObjcommError: whatever else ``objcomm.recv`` raises, on the same ranks.

    Examples:
        >>> from objcomm.compat import torch as dist_objects
        >>> dist_objects.recv_object_list([None], src=0)
        Traceback (most recent call last):
        objcomm.UsageError: recv_object_list: rank 0 is this rank itself; name another one
    """
    del device, use_batch
    name = "recv_object_list"
    p2p_call = _p2p_call(Receive, name, group, src, group_src, weights_only=weights_only)
    _entries(name, object_list)
    with p2p_call:
        arrival = p2p_call.awaited()
        _replace_all(name, arrival.peer, object_list, p2p_call.take_in(arrival))
    return p2p_call.group.ranks[arrival.peer]


def _call(
    operation: Operation,
    name: str,
    joined: Any,
    root: tuple[int | None, int | None] | None,
    weights_only: bool,  # noqa: FBT001  # passed on
) -> Call:
    """Create a call under torch's name; ``root`` is a global rank and a group rank."""
    # Torch's default is 0, in every group.
    global_root, group_root = (0, None) if root == (None, None) else root or (None, None)
    _check_root(name, joined, global_root, group_root)
    return Call(
        operation,
        group=joined,
        codec=_CODEC,
        global_root=global_root,
        group_root=group_root,
        root_argument="dst" if operation is Operation.GATHER else "src",
        has_root=root is not None,
        must_agree=name,
        allow=_safe(weights_only),
        called=name,
        is_met=operation in _met_first,
    )


#: Operations in which all ranks meet first, because some could otherwise return too early.
_met_first: set[Operation] = set()


def check_calls() -> None:
    """Make every rank raise in the call that does not match another rank's, as torch does.

    Every rank must call this, or none. This adds a few hundred microseconds to a small call.
    ``objcomm.check`` does the same for objcomm's own calls.
    """
    # In the other operations every rank waits for all others anyway.
    _met_first.update({Operation.BROADCAST, Operation.GATHER, Operation.SCATTER})


def _check_root(name: str, joined: Group, root: int | None, group_root: int | None) -> None:
    """Check a root or peer, to raise torch's class of error; the call itself checks it again.

    Raises:
        UsageError: there is no such rank, which is a RuntimeError with Gloo; or it is not an
            integer, which is a TypeError there.
    """
    try:
        joined.root(name, root, group_root)
    except UsageError as error:
        if root is not None and group_root is not None:
            raise  # a ValueError in torch, too
        number = whole_number(root if group_root is None else group_root)
        raise caught_as(error, TypeError if number is None else RuntimeError) from None


def _p2p_call(
    kind: type[E],
    name: str,
    group: GroupLike,
    peer: int | None,
    group_peer: int | None,
    *,
    weights_only: bool = False,
) -> E:
    """Create a call that sends to or receives from another rank.

    Raises:
        UsageError: an argument is wrong, or the other rank is this one.
    """
    _check_root(name, resolve(group, name), peer, group_peer)
    allow = _safe(weights_only)
    p2p_call = kind(peer, group_peer, _TAG, group, codec=_CODEC, allow=allow, name=name)
    if p2p_call.peer == p2p_call.group.rank:
        raise UsageError(f"{name}: rank {p2p_call.peer} is this rank itself; name another one")
    return p2p_call


def _safe(weights_only: bool) -> list[Any] | None:  # noqa: FBT001  # passed on
    """Return what a received pickle may name; None for everything."""
    if not weights_only:
        return None
    return [each[0] if isinstance(each, tuple) else each for each in get_safe_globals()]


def _copied(call: Call, obj: object) -> Any:
    """Copy this rank's own object, as torch does, so that later changes do not affect the list."""
    return call.alone(lambda: call.copy(obj)) if call.is_alone else call.copy(obj)


def _modules() -> list[ModuleType]:
    """Return the modules where torch has these functions: the public and the internal one."""
    if not dist.is_available():
        return []
    from torch.distributed import distributed_c10d  # noqa: PLC0415  # absent in some builds

    return [dist, distributed_c10d]


_FUNCTIONS = {name: globals()[name] for name in __all__ if name != "patch"}

_switch = Switch(_modules, _FUNCTIONS, is_reachable)


def patch() -> Patch:
    """Replace torch's object collectives with this module's functions.

    Every rank must call this before the calls that it is to affect. From then on, all code that
    calls ``torch.distributed.all_gather_object`` and the like calls objcomm: torch's own modules,
    accelerate, and others, in all threads of the process. If a module has imported a function by
    name (``from torch.distributed import all_gather_object``), the name is replaced in that module
    too. A class, a ``partial`` or a local variable that holds a function keeps torch's.

    Torch's functions still serve the groups that objcomm can't: those of the backends ``fake``,
    ``mpi`` and ``threaded``, those without a store that other processes can reach, those that
    torch's own code creates without ``new_group`` (as ``rpc.init_rpc`` does before there is a
    world), and anything that is not a process group. They also serve calls with options that this
    version does not know. All ranks make the same decision, because it depends only on values that
    are the same on every rank.

    Returns:
        A context manager that restores torch's functions on exit; its ``undo()`` method does the
        same without a block. Several patches may be active at the same time, in any threads;
        torch's functions are restored when the last one ends. Names imported meanwhile then act as
        torch's functions.

    Examples:
        >>> import torch.distributed as dist
        >>> from objcomm.compat import torch as dist_objects
        >>> gathered = [None]
        >>> with dist_objects.patch():
        ...     dist.all_gather_object(gathered, "a world of one")
        >>> gathered
        ['a world of one']
    """
    return Patch(_switch)


def _entries(name: str, given: Any) -> Sequence[Any]:
    """Return the caller's list.

    Raises:
        UsageError: it is not a list.
    """
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        error = UsageError(f"{name}: give a list of objects, not a {type(given).__name__}")
        raise caught_as(error, TypeError)
    return given


def _check_room(call: Call, given: Any) -> None:
    """Check that a list to fill has an entry for every rank.

    Raises:
        UsageError: it is not a list, or is too short.
    """
    if not isinstance(given, MutableSequence):
        error = UsageError(f"{call.operation}: give a list to fill, not a {type(given).__name__}")
        raise caught_as(error, TypeError)
    if len(given) < call.size:
        error = UsageError(
            f"{call.operation}: the list to fill has {len(given)} entries, but the group "
            f"has {call.size} ranks; give [None] * world_size"
        )
        raise caught_as(error, IndexError)


def _check_gather_list(call: Call, given: Any) -> None:
    """Check the list to gather into, which only the destination may pass.

    Raises:
        UsageError: as in ``_check_room``; or another rank has passed a list.
    """
    if call.is_root:
        if given is None or (isinstance(given, Sequence) and not given):
            raise UsageError(f"{call.operation}: the destination must give object_gather_list=")
        _check_room(call, given)
    elif given:
        raise UsageError(
            f"{call.operation}: only the destination, rank {call.root} of the group, may give "
            "object_gather_list="
        )


def _one_each(call: Call, given: Sequence[Any] | None) -> list[Any]:
    """Return the objects to scatter.

    Raises:
        UsageError: there is not one for each rank.
    """
    try:
        return one_each(call, given)
    except UsageError as error:
        if not given:
            raise  # a ValueError in torch, too
        raise caught_as(error, RuntimeError) from None


def _check_output(name: str, given: Any) -> None:
    """Check the list that takes this rank's object.

    Raises:
        UsageError: it is not a list, or is empty.
    """
    if not isinstance(given, MutableSequence) or not given:
        raise UsageError(f"{name}: scatter_object_output_list= must be a list with an entry")


def _replace_all(name: str, origin: int, box: Any, objects: Any) -> None:
    """Replace a list's entries with those of another rank.

    Raises:
        UsageError: ``box`` is not a list of the same length.
    """
    is_list = isinstance(box, MutableSequence)
    if not is_list or len(box) != len(objects):
        given = f"one of {len(box)} entries" if is_list else f"a {type(box).__name__}"
        error = UsageError(
            f"{name}: rank {origin} of the group sent {len(objects)} objects, but the list to fill "
            f"is {given}; give a list of the same length"
        )
        raise caught_as(error, RuntimeError if is_list else TypeError)
    _replace(box, objects)


def _replace(box: MutableSequence[Any], objects: Sequence[Any]) -> None:
    """Replace a list's first entries."""
    for place, obj in enumerate(objects):
        box[place] = obj
