"""Share a model's tensors from one rank, or average them over all ranks, in place."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from objcomm._calls.call import Call, plain_call
from objcomm._codecs.tensors import is_plain_tensor
from objcomm._collectives.fail_together import failing_together
from objcomm._config import GroupLike, Timeout
from objcomm._training.buckets import Bundle, Rule, synchronise
from objcomm._wire.header import Operation
from objcomm._world import process_group_of
from objcomm.errors import UsageError

#: Tensors, or pairs of name and tensor as from ``named_parameters()``.
Tensors: TypeAlias = Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


def broadcast_tensors(
    tensors: Tensors,
    src: int | None = None,
    *,
    group_src: int | None = None,
    name: str = "",
    group: GroupLike = None,
    timeout: Timeout = None,
) -> None:
    """Overwrite the tensors of every rank with those of one rank.

    Every rank of ``group`` must call this, with the same number of tensors and the same dtypes,
    shapes and device types, in the same order. Ranks compare these before any tensor moves. Tensors
    may have any dtype. Small tensors travel together; large ones are sent from and received into
    their own memory.

    Args:
        tensors: the tensors to overwrite, or pairs of name and tensor. Errors show the names, which
            must be the same on all ranks. Strides may differ. Parameters and other leaves that
            require gradients are allowed. No two tensors may overlap in part.
        src: global rank of the source.
        group_src: rank within the group, as an alternative to ``src``; defaults to the group's
            first rank.
        name: name of this call, as in ``objcomm.broadcast``.
        group: the participating ranks; defaults to the world.
        timeout: seconds or timedelta; defaults to the group's own.

    Raises:
        UsageError: an argument is invalid. Raised on each rank that passed it, before any traffic.
        NotInGroupError: this rank is not a member of ``group``.
        CollectiveError: two ranks have different tensors, and the error names the first difference
            and the two ranks; or a tensor on some rank can't be changed in place (sparse, expanded,
            without memory). Raised on every rank, before any tensor changes.
        DesyncError: ranks are in different operations. Raised once on every rank: where it waits,
            or in its next call.
        TransportTimeout: the timeout expired. Raised on every rank that was still waiting; the
            contents of its tensors are then undefined.
        TransportError: a rank died. Raised on every rank that waited for it; the contents of its
            tensors are then undefined.

    Examples:
        >>> import objcomm, torch
        >>> counts = torch.tensor([3, 4])
        >>> objcomm.models.broadcast_tensors([counts])
        >>> counts
        tensor([3, 4])
    """
    make = partial(_bundles, Rule.SHARE, tensors)
    root = src, group_src
    _synchronise(Operation.BROADCAST_TENSORS, make, name, group, timeout, root=root)


def average_tensors(
    tensors: Tensors, *, name: str = "", group: GroupLike = None, timeout: Timeout = None
) -> None:
    """Replace the tensors of every rank by their mean over the ranks, in place.

    Every rank of ``group`` must call this, as in ``broadcast_tensors``. Means are computed in
    float64, in rank order, and rounded once to the tensor's dtype. Half-precision tensors do not
    overflow, equal tensors stay as they are, and all ranks get the same bits. Tensors whose dtype
    has no mean (integers, bools, 8-bit floats) are replaced by those of the group's first rank.

    Args:
        tensors: as in ``broadcast_tensors``.
        name: name of this call, as in ``objcomm.broadcast``.
        group: the participating ranks; defaults to the world.
        timeout: seconds or timedelta; defaults to the group's own.

    Raises:
        ObjcommError: whatever ``broadcast_tensors`` raises, on the same ranks.

    Examples:
        >>> import objcomm, torch
        >>> weights = torch.tensor([1.5, 2.0])
        >>> objcomm.models.average_tensors([weights])
        >>> weights
        tensor([1.5000, 2.0000])
    """
    make = partial(_bundles, Rule.AVERAGE, tensors)
    _synchronise(Operation.AVERAGE_TENSORS, make, name, group, timeout)


def sync_buffers(
    buffers: Tensors,
    *,
    average: bool = True,
    name: str = "",
    group: GroupLike = None,
    timeout: Timeout = None,
) -> None:
    """Make a model's buffers equal on every rank, in place.

    Every rank of ``group`` must call this, as in ``broadcast_tensors``. Counters, indices and masks
    are always replaced by those of the group's first rank.

    Args:
        buffers: as in ``broadcast_tensors``, such as ``model.named_buffers()``.
        average: whether to average floating-point and complex buffers, as in ``average_tensors``.
            If not, all buffers are replaced by those of the group's first rank, as in
            DistributedDataParallel.
        name: name of this call, as in ``objcomm.broadcast``.
        group: the participating ranks; defaults to the world.
        timeout: seconds or timedelta; defaults to the group's own.

    Raises:
        ObjcommError: whatever ``broadcast_tensors`` raises, on the same ranks.

    Examples:
        >>> import objcomm, torch
        >>> objcomm.models.sync_buffers(torch.nn.BatchNorm1d(4).named_buffers())
    """
    rule = Rule.AVERAGE if average else Rule.SHARE
    make = partial(_bundles, rule, buffers)
    _synchronise(Operation.SYNC_BUFFERS, make, name, group, timeout)


def sync_gradients(
    params: Tensors, *, name: str = "", group: GroupLike = None, timeout: Timeout = None
) -> None:
    """Average the gradients of parameters over the ranks, in place; call this after ``backward``.

    Every rank of ``group`` must call this, with the same parameters in the same order. The result
    is that of DistributedDataParallel: the ranks' shares are added up in rank order, those of
    half-precision gradients in float32. Everything accumulated since the last ``zero_grad`` counts.

    A gradient that is None on some ranks counts as zeros there, and those ranks get the average
    too. A gradient that is None on all ranks stays None. DistributedDataParallel does the same with
    ``find_unused_parameters=True``.

    Args:
        params: parameters, or pairs of name and parameter, such as ``model.named_parameters()``;
            as in ``broadcast_tensors``.
        name: name of this call, as in ``objcomm.broadcast``.
        group: the participating ranks; defaults to the world.
        timeout: seconds or timedelta; defaults to the group's own.

    Raises:
        CollectiveError: two ranks have different parameters, or some rank has none, and the error
            names the first difference and the two ranks; or a gradient is sparse. Raised on every
            rank, before any gradient changes.
        ObjcommError: whatever else ``broadcast_tensors`` raises, on the same ranks.

    Examples:
        >>> import objcomm, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> model(torch.ones(3, 2)).sum().backward()
        >>> objcomm.models.sync_gradients(model.named_parameters())
        >>> model.bias.grad
        tensor([3.])
    """
    _synchronise(Operation.SYNC_GRADIENTS, partial(_gradients, params), name, group, timeout)


@contextlib.contextmanager
def eager_sync_gradients(
    params: Tensors, *, name: str = "", group: GroupLike = None, timeout: Timeout = None
) -> Iterator[None]:
    """Run a block with any number of ``backward`` calls, then average the gradients.

    Every rank of ``group`` must enter the block. At its end, gradients are averaged as in
    ``sync_gradients``, including those accumulated before the block. If the block raises on one
    rank, all ranks raise, even those that wait in another operation, and no gradient is averaged.

    Args:
        params: as in ``sync_gradients``.
        name: name of this call, as in ``objcomm.broadcast``.
        group: the participating ranks; defaults to the world.
        timeout: seconds or timedelta; defaults to the group's own.

    Raises:
        CollectiveError: the block raised on some rank. Raised on every rank; on a failing rank,
            chained to its own exception. Later calls work. Also raised where ``sync_gradients``
            raises it.
        ObjcommError: whatever else ``fail_together`` and ``sync_gradients`` raise.

    Examples:
        >>> import objcomm, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> with objcomm.models.eager_sync_gradients(model.parameters()):
        ...     for batch in torch.ones(4, 3, 2):
        ...         model(batch).sum().backward()
        >>> model.bias.grad
        tensor([12.])
    """
    with failing_together(Operation.EAGER_SYNC_GRADIENTS, group, timeout, name=name):
        kept = _listed(params)  # an iterator may not outlive the block
        yield
    sync_gradients(kept, name=name, group=group, timeout=timeout)


def sync_model(
    model: torch.nn.Module,
    *,
    sync_buffers: bool = True,
    average_buffers: bool = True,
    name: str = "",
    group: GroupLike = None,
    timeout: Timeout = None,
) -> None:
    """Average a model's gradients and make its buffers equal; call this after ``backward``.

    Every rank of ``group`` must call this. The names, order, dtypes and shapes of the parameters
    and buffers must be the same on all ranks.

    Args:
        model: the model to synchronize.
        sync_buffers: whether to synchronize buffers.
        average_buffers: as ``average`` in ``sync_buffers``.
        name: name of this call, as in ``objcomm.broadcast``.
        group: the participating ranks; defaults to the world.
        timeout: seconds or timedelta; defaults to the group's own.

    Raises:
        ObjcommError: whatever ``sync_gradients`` raises, on the same ranks.

    Examples:
        >>> import objcomm, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> model(torch.ones(3, 2)).sum().backward()
        >>> objcomm.models.sync_model(model)
    """
    rule = Rule.AVERAGE if average_buffers else Rule.SHARE

    def bundles() -> Sequence[Bundle]:
        buffers = model.named_buffers() if sync_buffers else ()
        return [*_gradients(model.named_parameters()), *_bundles(rule, buffers)]

    _synchronise(Operation.SYNC_MODEL, bundles, name, group, timeout)


@contextlib.contextmanager
def eager_sync_model(
    model: torch.nn.Module,
    *,
    sync_buffers: bool = True,
    average_buffers: bool = True,
    name: str = "",
    group: GroupLike = None,
    timeout: Timeout = None,
) -> Iterator[None]:
    """Run a block with any number of ``backward`` calls, then do what ``sync_model`` does.

    Every rank of ``group`` must enter the block. If it raises on one rank, all ranks raise, as in
    ``eager_sync_gradients``.

    Args:
        model: the model to synchronize.
        sync_buffers: as in ``sync_model``.
        average_buffers: as in ``sync_model``.
        name: name of this call, as in ``objcomm.broadcast``.
        group: the participating ranks; defaults to the world.
        timeout: seconds or timedelta; defaults to the group's own.

    Raises:
        ObjcommError: whatever ``eager_sync_gradients`` raises, on the same ranks.

    Examples:
        >>> import objcomm, torch
        >>> model = torch.nn.BatchNorm1d(2)
        >>> with objcomm.models.eager_sync_model(model):
        ...     model(torch.ones(3, 2)).sum().backward()
    """
    with failing_together(Operation.EAGER_SYNC_MODEL, group, timeout, name=name):
        yield
    sync_model(
        model,
        sync_buffers=sync_buffers,
        average_buffers=average_buffers,
        name=name,
        group=group,
        timeout=timeout,
    )


def broadcast_model(
    model: torch.nn.Module,
    src: int | None = None,
    *,
    group_src: int | None = None,
    name: str = "",
    group: GroupLike = None,
    timeout: Timeout = None,
) -> None:
    """Overwrite a model's parameters and buffers on every rank with those of one rank.

    Every rank of ``group`` must call this. The names, order, dtypes and shapes of the parameters
    and buffers must be the same on all ranks.

    Args:
        model: the model to overwrite.
        src: global rank of the source.
        group_src: rank within the group, as an alternative to ``src``; defaults to the group's
            first rank.
        name: name of this call, as in ``objcomm.broadcast``.
        group: the participating ranks; defaults to the world.
        timeout: seconds or timedelta; defaults to the group's own.

    Raises:
        ObjcommError: whatever ``broadcast_tensors`` raises, on the same ranks.

    Examples:
        >>> import objcomm, torch
        >>> objcomm.models.broadcast_model(torch.nn.Linear(2, 1))
    """

    def bundles() -> Sequence[Bundle]:
        return _bundles(Rule.SHARE, model.named_parameters(), model.named_buffers())

    root = src, group_src
    _synchronise(Operation.BROADCAST_MODEL, bundles, name, group, timeout, root=root)


def wrap(
    model: torch.nn.Module,
    *,
    name: str = "",
    group: GroupLike = None,
    timeout: Timeout = None,
    **options: Any,
) -> torch.nn.Module:
    """Wrap a model in ``torch.nn.parallel.DistributedDataParallel`` if there are other ranks.

    Every rank of ``group`` must call this. The names, order, dtypes and shapes of the parameters
    and buffers must be the same on all ranks, and so must the set of parameters that require
    gradients. Ranks compare these first; if they differed, torch could hang or mix up parameters.

    Args:
        model: a model on the CPU, or on a single device.
        name: name of this call, as in ``objcomm.broadcast``.
        group: the participating ranks; defaults to the world.
        timeout: for the comparison, seconds or timedelta; defaults to the group's own.
        options: more keywords for DistributedDataParallel, such as ``find_unused_parameters``, but
            not ``device_ids`` or ``process_group``.

    Returns:
        The wrapped model; the model itself in a world of one, or if no parameter requires a
        gradient.

    Raises:
        UsageError: ``options`` contains a keyword that this function sets itself. Raised on every
            rank that passed it, before any traffic.
        CollectiveError: two ranks have different models. Raised on every rank.
        ObjcommError: whatever else ``broadcast_tensors`` raises, on the same ranks.

    Examples:
        >>> import objcomm, torch
        >>> objcomm.models.wrap(torch.nn.Linear(2, 1))
        Linear(in_features=2, out_features=1, bias=True)
    """
    taken = sorted(options.keys() & {"module", "device_ids", "process_group"})
    if taken:
        raise UsageError(f"wrap sets {taken[0]}= itself; call torch's class directly to choose it")
    trained: list[tuple[str, torch.Tensor]] = []

    def bundles() -> Sequence[Bundle]:
        named = list(model.named_parameters())
        trained.extend(each for each in named if each[1].requires_grad)
        # Torch copies the frozen ones from the first rank, too; it takes packed types as they are.
        others = [each for each in named if is_plain_tensor(each[1])]
        marked = [(f"{name} (to be trained)", tensor) for name, tensor in trained]
        return _bundles(Rule.SHARE, others, marked, model.named_buffers())

    call = _synchronise(Operation.WRAP, bundles, name, group, timeout, moves=False)
    if call.is_alone or not trained:
        return model
    devices = {parameter.device for parameter in model.parameters()}
    device = devices.pop() if len(devices) == 1 else torch.device("cpu")
    return torch.nn.parallel.DistributedDataParallel(
        model,
        device_ids=None if device.type == "cpu" else [device.index],
        process_group=process_group_of(group),
        **options,
    )


def _synchronise(
    operation: Operation,
    make: Callable[[], Sequence[Bundle]],
    name: str,
    group: GroupLike,
    timeout: Timeout,
    *,
    root: tuple[int | None, int | None] | None = None,
    moves: bool = True,
) -> Call:
    """Make one call that synchronizes the bundles; ``root`` is ``src`` and ``group_src``."""
    src, group_src = root or (None, None)
    with plain_call(
        operation,
        name=name,
        group=group,
        timeout=timeout,
        global_root=src,
        group_root=group_src,
        has_root=root is not None,
    ) as call:
        synchronise(call, make, moves=moves)
    return call


def _bundles(rule: Rule, *parts: Tensors) -> list[Bundle]:
    """Create one bundle for each part, which has tensors or pairs of name and tensor."""
    bundles = []
    for part in parts:
        given: list[Any] = list(part)
        names, found = [""] * len(given), given
        if any(isinstance(each, tuple) for each in given):
            if {isinstance(each, tuple) and len(each) for each in given} != {2}:
                raise UsageError("pass tensors, or pairs of a name and a tensor, but not both")
            # A NUL ends the name in a manifest's line.
            names = [str(name).replace("\0", "\\0") for name, _ in given]
            found = [tensor for _, tensor in given]
        bundles.append(Bundle(rule, names, found, found))
    return bundles


def _gradients(params: Tensors) -> list[Bundle]:
    found = _bundles(Rule.GRADIENTS, _listed(params))
    return [each._replace(tensors=[like.grad for like in each.likes]) for each in found]


def _listed(params: Tensors) -> list[Any]:
    if isinstance(params, torch.Tensor):  # its rows are tensors too, but without gradients
        raise UsageError("pass a list of parameters, not a single one")
    return list(params)
