"""Each rank's part of a dataset, for ``torch.utils.data``."""

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
    """Select this rank's samples of a dataset: every ``world_size``-th, starting at its rank.

    Ranks do not communicate; they all compute the same order.

    Args:
        numel: number of samples in the dataset; the same on every rank.
        shuffle: whether to shuffle, in the same order as torch's DistributedSampler; see
            ``set_epoch``.
        seed: for shuffling; the same on every rank.
        even: whether to give all ranks the same number of samples, by repeating the first ones.
        group: the participating ranks; defaults to the world.

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
        """Choose the order of the next iteration; without a call it is always that of epoch 0.

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
        """The return type of ``loader``: torch's own types declare ``sampler`` as an iterable."""

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
    """Create a data loader for this rank's part of a dataset.

    Ranks do not communicate. All ranks must pass datasets of the same length.

    With ``shuffle``, every rank gets the same number of samples and so takes the same number of
    steps; the first samples of the order are repeated as needed, as in torch's DistributedSampler.
    Without ``shuffle``, each sample occurs exactly once, as an evaluation requires. The lower ranks
    may then have one sample more than the others, so their loops may take one step more, in which
    they must not communicate.

    Args:
        dataset: a dataset with a length and access by index.
        args: more positional arguments for ``klass``.
        shuffle: whether to shuffle. ``loader.sampler.set_epoch(epoch)`` chooses the order of an
            epoch, also in a world of one.
        klass: creates the loader; called with ``sampler=``.
        group: the participating ranks; defaults to the world.
        seed: for shuffling; the same on every rank.
        kwargs: more keyword arguments for ``klass``, such as ``batch_size``.

    Returns:
        What ``klass`` returns. The ``sampler`` of torch's DataLoader is an ``objcomm.Shard``.

    Raises:
        UsageError: the dataset has no length, ``sampler=`` or ``batch_sampler=`` is given,
            ``klass`` is not callable, or ``seed`` is not an integer.
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
