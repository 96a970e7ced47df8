"""A model's tensors on all ranks: shared from one, or averaged, in place."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from objcomm._calls.call import Call
from objcomm._codecs.tensors import is_plain_tensor
from objcomm._collectives.fail_together import failing_together
from objcomm._config import GroupLike, Timeout
from objcomm._training.buckets import Bundle, Rule, synchronise
from objcomm._wire.header import Operation
from objcomm._world import process_group_of
from objcomm.errors import UsageError

#: Tensors, or names and tensors as ``named_parameters()`` gives them.
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
    """Overwrite tensors of every rank with one rank's, whatever their dtypes.

    Every rank of ``group`` must call this, with as many tensors of equal dtypes, shapes and types
    of device, in the same order. That is compared before anything moves. Small tensors travel
    together; large ones go from their own memory into their own.

    Args:
        tensors: what to overwrite, or pairs of a name, which errors show and which must agree,
            and a tensor. Strides are free; parameters and other leaves that require gradients
            may be among them. Two of them must not overlap in part.
        src: global rank whose tensors all get.
        group_src: the same as a rank within the group; give one. Neither: the group's first rank.
        name: of this call, as in ``objcomm.broadcast``.
        group: who takes part; None for the world.
        timeout: seconds or timedelta; the group's own if None.

    Raises:
        UsageError: an argument is wrong. Every rank that gave it, before any traffic.
        NotInGroupError: this rank is not a member of ``group``.
        CollectiveError: two ranks have other tensors, and the error names the first difference and
            the two; or some rank's can't be changed in place (sparse, expanded, without memory).
            Every rank, and nothing has changed.
        DesyncError: ranks are in different operations. Every rank, once: where it waits, or in its
            next call.
        TransportTimeout: the limit passed. Every rank that still waited; what its tensors hold
            is undefined.
        TransportError: a rank died. Every rank that waited for it, and likewise.

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
    """Replace tensors of every rank by their mean over the ranks, in place.

    Every rank of ``group`` must call this, as ``broadcast_tensors``. Means are taken in float64,
    in rank order, and rounded once to the tensor's own dtype: halves do not overflow, equal tensors
    stay as they are, and all ranks get the same bits. Tensors that have no mean of their own dtype
    (integers, bools, 8-bit floats) become those of the group's first rank; none is left out.

    Args:
        tensors: as in ``broadcast_tensors``.
        name: of this call, as in ``objcomm.broadcast``.
        group: who takes part; None for the world.
        timeout: seconds or timedelta; the group's own if None.

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

    Every rank of ``group`` must call this, as ``broadcast_tensors``. Counters, indices and masks
    are shared from the group's first rank, whatever ``average`` says.

    Args:
        buffers: as in ``broadcast_tensors``, such as ``model.named_buffers()``.
        average: whether those with fractions are averaged, as ``average_tensors`` does; if not,
            all become the group's first rank's, as in DistributedDataParallel.
        name: of this call, as in ``objcomm.broadcast``.
        group: who takes part; None for the world.
        timeout: seconds or timedelta; the group's own if None.

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
    """Average parameters' gradients over the ranks, in place; to be called after ``backward``.

    Every rank of ``group`` must call this, with the same parameters in the same order. Gradients
    come out as DistributedDataParallel's: each rank's share is added up in rank order, halves in
    float32. All that has accumulated since the last ``zero_grad`` counts.

    A gradient that is None on some ranks counts as zeros there, and they get the average too; one
    that is None on all ranks stays None. So does DistributedDataParallel with
    ``find_unused_parameters=True``.

    Args:
        params: parameters, or pairs of a name and a parameter, such as
            ``model.named_parameters()``; as in ``broadcast_tensors``.
        name: of this call, as in ``objcomm.broadcast``.
        group: who takes part; None for the world.
        timeout: seconds or timedelta; the group's own if None.

    Raises:
        CollectiveError: two ranks have other parameters, or some rank none, and the error names
            the first difference and the two ranks; or a gradient is sparse. Every rank, and no
            gradient has changed.
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

    Every rank of ``group`` must enter the block. At its end gradients are what ``sync_gradients``
    makes of them, those accumulated before the block included. An exception that escapes from the
    block on one rank is raised on all, also where they wait in another operation, and no gradient
    is averaged then.

    Args:
        params: as in ``sync_gradients``.
        name: of this call, as in ``objcomm.broadcast``.
        group: who takes part; None for the world.
        timeout: seconds or timedelta; the group's own if None.

    Raises:
        CollectiveError: the block failed on some rank; every rank, from its own exception where it
            has one, and later calls work. Or whatever ``sync_gradients`` says.
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
    """Average a model's gradients, and make its buffers equal; to be called after ``backward``.

    Every rank of ``group`` must call this, with the same parameters and buffers by name, order,
    dtype and shape.

    Args:
        model: whose.
        sync_buffers: whether buffers are synchronised.
        average_buffers: how, as ``average`` in ``sync_buffers``.
        name: of this call, as in ``objcomm.broadcast``.
        group: who takes part; None for the world.
        timeout: seconds or timedelta; the group's own if None.

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

    Every rank of ``group`` must enter the block. A failure in it is every rank's, as in
    ``eager_sync_gradients``.

    Args:
        model: whose.
        sync_buffers: as in ``sync_model``.
        average_buffers: as in ``sync_model``.
        name: of this call, as in ``objcomm.broadcast``.
        group: who takes part; None for the world.
        timeout: seconds or timedelta; the group's own if None.

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
    """Overwrite a model's parameters and buffers on every rank with one rank's.

    Every rank of ``group`` must call this, with the same parameters and buffers by name, order,
    dtype and shape.

    Args:
        model: whose.
        src: global rank whose model all get.
        group_src: the same as a rank within the group; give one. Neither: the group's first rank.
        name: of this call, as in ``objcomm.broadcast``.
        group: who takes part; None for the world.
        timeout: seconds or timedelta; the group's own if None.

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
    """Put a model into ``torch.nn.parallel.DistributedDataParallel`` where there are other ranks.

    Every rank of ``group`` must call this, with the same parameters and buffers by name, order,
    dtype and shape, the same of them to be trained: they are compared first, where torch may wait
    for ever, or mix them up.

    Args:
        model: on the CPU, or on one device.
        name: of this call, as in ``objcomm.broadcast``.
        group: who takes part; None for the world.
        timeout: seconds or timedelta, for the comparison; the group's own if None.
        options: more keywords for DistributedDataParallel, such as ``find_unused_parameters``; not
            ``device_ids`` and ``process_group``.

    Returns:
        The wrapped model; the model itself in a world of one, and where no parameter requires a
        gradient.

    Raises:
        UsageError: an option is one that this finds out itself. Every rank that gave it, before
            any traffic.
        CollectiveError: two ranks have other models. Every rank.
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
        # Torch copies the others from the first rank, too; those of packed types as they are.
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
    """One call on the tensors of some bundles; a root is given as ``src`` and ``group_src``."""
    src, group_src = root or (None, None)
    with Call(
        operation,
        name=name,
        group=group,
        timeout=timeout,
        codec="msgpack",
        global_root=src,
        group_root=group_src,
        has_root=root is not None,
    ) as call:
        synchronise(call, make, moves=moves)
    return call


def _bundles(rule: Rule, *parts: Tensors) -> list[Bundle]:
    """One for each part: tensors, or pairs of a name and a tensor."""
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
    if isinstance(params, torch.Tensor):  # its rows are tensors, too, but have no gradients
        raise UsageError("pass a list of parameters, not a single one")
    return list(params)
