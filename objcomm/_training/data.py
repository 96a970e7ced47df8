"""Each rank's part of a data set, for ``torch.utils.data``."""

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch.utils.data import DataLoader, Sampler

from objcomm._calls.group import resolve
from objcomm._config import GroupLike, whole_number
from objcomm.errors import UsageError

L = TypeVar("L")


class Shard(Sampler[int]):
    """Which members of a data set are this rank's: every so many-th, from its rank on.

    Local: ranks agree because they compute the same.

    Args:
        numel: members of the data set; the same on every rank.
        shuffle: whether to deal a new order in each epoch, the same as torch's DistributedSampler.
        seed: of that order; the same on every rank.
        even: whether all ranks get equally many, for which the first members are dealt again.
        group: who takes part; None for the world.

    Examples:
        >>> import objcomm
        >>> list(objcomm.Shard(5))
        [0, 1, 2, 3, 4]
    """

    def __init__(
        self,
        numel: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        even: bool = False,
        group: GroupLike = None,
    ) -> None:
        found = whole_number(numel)
        if found is None or found < 0:
            raise UsageError(f"Shard: numel={numel!r} must be an integer, 0 or greater")
        here = resolve(group, "loader")
        self._rank, self._size = here.rank, here.size
        self._numel = found
        self._is_shuffled = shuffle
        self._seed = seed
        self._is_even = even
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration; without a call it is always the first epoch's.

        Args:
            epoch: the same on every rank.
        """
        self._epoch = epoch

    def __len__(self) -> int:
        if self._is_even:
            return math.ceil(self._numel / self._size)
        return len(range(self._rank, self._numel, self._size))

    def __iter__(self) -> Iterator[int]:
        order = list(range(self._numel))
        if self._is_shuffled:
            generator = torch.Generator().manual_seed(self._seed + self._epoch)
            order = torch.randperm(self._numel, generator=generator, device="cpu").tolist()
        if self._is_even and order:
            while len(order) < len(self) * self._size:
                order += order[: len(self) * self._size - len(order)]
        return iter(order[self._rank :: self._size])


if TYPE_CHECKING:

    class _Sharded(DataLoader[Any]):
        """What ``loader`` returns, of which torch's types know the sampler only as an iterable."""

        sampler: Shard


@overload
def loader(
    dataset: Any,
    *args: Any,
    shuffle: bool = False,
    klass: Callable[..., L],
    group: GroupLike = None,
    seed: int = 0,
    **kwargs: Any,
) -> L: ...
@overload
def loader(
    dataset: Any,
    *args: Any,
    shuffle: bool = False,
    group: GroupLike = None,
    seed: int = 0,
    **kwargs: Any,
) -> "_Sharded": ...
def loader(
    dataset: Any,
    *args: Any,
    shuffle: bool = False,
    klass: Callable[..., Any] = DataLoader,
    group: GroupLike = None,
    seed: int = 0,
    **kwargs: Any,
) -> Any:
    """A data loader of this rank's part of a data set.

    Local: needs no other rank. All ranks must give data sets of one length.

    With ``shuffle`` every rank gets equally many members, so that all take as many steps; the first
    of the order are dealt again for that, as torch's DistributedSampler does. Without, each member
    is dealt once, for an evaluation that must count right: the lower ranks may have one more than
    the others, so their loops may be one step longer, and must not communicate in it.

    Args:
        dataset: with a length, and members by index.
        args: more of ``klass``'s, such as the batch size.
        shuffle: whether members come in an order of the epoch's:
            ``loader.sampler.set_epoch(epoch)`` chooses it, in a world of one too.
        klass: makes the loader; called with ``sampler=``.
        group: who takes part; None for the world.
        seed: of the order; the same on every rank.
        kwargs: more of ``klass``'s.

    Returns:
        What ``klass`` returned, for torch's DataLoader with a ``objcomm.Shard`` as ``sampler``.

    Raises:
        UsageError: the data set has no length, or ``sampler=`` or ``batch_sampler=`` is given.
        NotInGroupError: this rank is not a member of ``group``.

    Examples:
        >>> import objcomm
        >>> list(map(len, objcomm.loader(range(5), batch_size=2)))
        [2, 2, 1]
    """
    if not hasattr(dataset, "__len__"):
        raise UsageError(
            f"loader: a {type(dataset).__name__} has no length, so its samples can't be divided "
            "among ranks; make it iterate over this rank's share"
        )
    for taken in ("sampler", "batch_sampler"):
        if kwargs.get(taken) is not None:
            raise UsageError(f"loader sets {taken}= itself; call {klass!r} directly to choose it")
    if not callable(klass):
        raise UsageError(f"loader: klass={klass!r} must be a class that makes a loader")
    if whole_number(seed) is None:
        raise UsageError(f"loader: seed={seed!r} must be an integer")
    shard = Shard(len(dataset), shuffle=shuffle, seed=seed, even=shuffle, group=group)
    return klass(dataset, *args, **(kwargs | {"sampler": shard}))
