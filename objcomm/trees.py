"""Named reductions, leaf by leaf: of a number, a tensor, or containers of them.

First every rank's structure meets at one rank, together with all leaves that are small. That rank
compares the structures, folds the leaves it has, and answers all: with an error, or with the
results and with what is to follow. Then all ranks combine the large tensors together.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from objcomm import elementwise, structures
from objcomm.answers import Answer, Place, operand, received
from objcomm.bodies import answered
from objcomm.call import Call
from objcomm.codecs.tensors import resize_locks
from objcomm.config import settings
from objcomm.errors import UsageError
from objcomm.frames import Status
from objcomm.leaves import Tensors, flat_of, room_for, tensors_of
from objcomm.message import Message
from objcomm.ops import Operator
from objcomm.structures import ABSENT, DifferenceError, Leaf
from objcomm.transport import reduction, routes
from objcomm.transport.device_reduction import reduce_on_device
from objcomm.transport.exchange import Exchange

_HOST = torch.device("cpu")

# Up to so many bytes of tensors travel with the structure, and all ranks' fit into one window.
_INLINE_NBYTES = 16 << 10


@dataclasses.dataclass(frozen=True, slots=True)
class Leafwise:
    """What a caller says about a reduction of leaves.

    Attributes:
        dtype: in which floating dtype to add up; each leaf's own choice if None.
        may_lack: whether keys may be missing on some ranks.
    """

    dtype: torch.dtype | None = None
    may_lack: bool = False

    @property
    def text(self) -> str:
        """What must agree on all ranks."""
        return f"{self.dtype or ''}{'?' * self.may_lack}"


def options_for(operator: Operator, dtype: torch.dtype | None, missing: str) -> Leafwise:
    """The options from a call's arguments.

    Raises:
        UsageError: they make no sense, or not for this operator.
    """
    if missing not in {"error", "skip"}:
        raise UsageError(f"missing={missing!r} is neither 'error' nor 'skip'")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise UsageError(f"dtype={dtype!r} is no torch.dtype")
    if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        raise UsageError(f"dtype={dtype} has no fractions: integers are added up as they are")
    if dtype is not None and operator.name not in {"sum", "prod", "mean"}:
        raise UsageError(f"dtype= is for sum, prod and mean; {operator.name!r} adds nothing up")
    if missing == "skip" and not operator.is_leafwise:
        raise UsageError("missing='skip' is for the named ops that go leaf by leaf")
    return Leafwise(dtype, missing == "skip")


def alone(operator: Operator, obj: Any, options: Leafwise) -> Any:
    """The reduction of a single operand."""
    structure, leaves = structures.describe(obj, operator, 0)
    _, merged = structures.merge([structure], may_lack=False)
    results = [
        _folded(operator, leaf, [value], options)
        for leaf, value in zip(merged, leaves, strict=True)
    ]
    return structures.rebuild(structure, obj, results)


class TreeReduction:
    """One reduction on this rank."""

    def __init__(self, call: Call, operator: Operator, obj: Any, options: Leafwise) -> None:
        """Describe this rank's operand; an error becomes its failure."""
        self._call = call
        self._operator = operator
        self._options = options
        self._own = obj
        self._structure: Any = None
        self._leaves: list[Any] = []
        self._mine_follows = False
        self._mine = call.message(self._describe)
        self._answer: Answer | None = None
        self._followed: dict[int, Any] = {}
        self._is_taker = True

    def _describe(self) -> tuple[Any, list[Any], str]:
        structure, leaves = structures.describe(self._own, self._operator, self._call.rank)
        self._structure, self._leaves = structure, leaves
        self._locks = [resize_locks(leaf) for leaf in leaves]
        # Containers of its own: an asynchronous call's caller may change theirs meanwhile.
        self._own = structures.rebuild(structure, self._own, leaves)
        abouts = [tensors_of(each) for _, each in structures.leaves_of(structure)]
        nbytes = sum(about.nbytes for about in abouts if about is not None)
        # What travels outside of messages is not signed.
        if nbytes <= _INLINE_NBYTES or self._call.exchange.gate.signer is not None:
            return structure, leaves, self._call.exchange.device.linked
        self._mine_follows = True
        small = [
            value if about is None else None for value, about in zip(leaves, abouts, strict=True)
        ]
        return structure, small, self._call.exchange.device.linked

    def run(self, exchange: Exchange, root: int | None) -> Message:
        """The traffic: all results to ``root``, or to all ranks if it is None."""
        hub = routes.HUB if root is None else root
        self._is_taker = root in {None, exchange.rank}

        def answer(messages: list[Message]) -> tuple[Any, ...]:
            found = self._answer = self._merged(messages)
            # Folded results are of no use to ranks that get none.
            return tuple(found if root is None else found._replace(folded=()))

        message = answered(self._call, exchange, self._mine, answer, hub)
        if self._may_follow and message.header.status == Status.VALUE:
            self._follow(exchange, self._read(message), root)
        return message

    @property
    def _may_follow(self) -> bool:
        return self._mine_follows or self._options.may_lack

    def value(self, message: Message) -> Any:
        """The result on a rank that gets one, else None."""
        self._call.raise_failures([message])
        if not self._is_taker:
            return None
        answer = self._read(message)
        structure = self._structure if answer.structure is None else answer.structure
        folded = iter(answer.folded)
        count = sum(1 for _ in structures.leaves_of(structure))
        results = [
            self._followed[at] if at in self._followed else next(folded) for at in range(count)
        ]
        return structures.rebuild(structure, self._own, results)

    def _read(self, message: Message) -> Answer:
        if self._answer is None:
            self._answer = received(self._call.decode(message), self._place())
        return self._answer

    def _place(self) -> Place:
        return Place(
            structure=self._structure,
            rank=self._call.rank,
            size=self._call.size,
            is_taker=self._is_taker,
            may_follow=self._may_follow,
            linked=self._call.exchange.device.linked,
            most_nbytes=settings().max_nbytes,
        )

    def _merged(self, messages: list[Message]) -> Answer:
        found: list[tuple[Any, list[Any], str]] = [
            (self._structure, self._own_leaves(), self._call.exchange.device.linked)
            if message is self._mine
            else operand(self._call.decode(message))
            for message in messages
        ]
        described = [each[0] for each in found]
        structure, leaves = structures.merge(described, may_lack=self._options.may_lack)
        folded, following = [], []
        for at, leaf in enumerate(leaves):
            values = [found[rank][1][place] for rank, place in leaf.places.items()]
            if any(value is None for value in values) and _is_large(leaf):
                following.append((at, tuple(leaf.places)))
            else:
                folded.append(self._fold(structure, at, leaf, values))
        is_same = all(each == structure for each in described)
        linked = {each[2] for each in found}
        answer = Answer(
            None if is_same else structure,
            folded,
            following,
            linked.pop() if len(linked) == 1 else "",
        )
        return received(answer, self._place()) if self._options.may_lack else answer

    def _own_leaves(self) -> list[Any]:
        """As the others' come: those that follow are None, and an operator may change the rest."""
        descriptions = [each for _, each in structures.leaves_of(self._structure)]
        leaves = []
        for value, about in zip(self._leaves, descriptions, strict=True):
            if tensors_of(about) is not None:
                leaves.append(None if self._mine_follows else value)
            else:
                leaves.append(self._call.copy(value) if type(about) is tuple else value)
        return leaves

    def _fold(self, structure: Any, at: int, leaf: Leaf, values: list[Any]) -> Any:
        try:
            return _folded(self._operator, leaf, values, self._options)
        except DifferenceError as error:
            raise DifferenceError(_path(structure, at), error.ranks, error.reason) from None
        except Exception as error:
            raise UsageError(f"{_path(structure, at)}: {error}") from error

    def _follow(self, exchange: Exchange, answer: Answer, root: int | None) -> None:
        """Combine the large leaves, on all ranks together."""
        structure = self._structure if answer.structure is None else answer.structure
        descriptions = [each for _, each in structures.leaves_of(structure)]
        own = structures.aligned(structure, self._own)
        rooms = {}
        on_host: list[reduction.Part] = []
        on_device: list[reduction.Part] = []
        for at, ranks in answer.following:
            about = tensors_of(descriptions[at])
            if about is None:
                raise UsageError("an answer names a leaf that is no tensor")
            is_linked = about.device_type == answer.linked and len(ranks) == exchange.size
            where = exchange.device.device if is_linked and not about.is_array else None
            part, rooms[at] = self._part(about, own[at], tuple(ranks), where or _HOST)
            (on_host if where is None else on_device).append(part)
        reduction.reduce_tensors(exchange, on_host, root)
        reduce_on_device(exchange, on_device)
        for at, (result, device) in rooms.items():
            is_tensor = isinstance(result, torch.Tensor)
            self._followed[at] = result.to(device) if is_tensor else result

    def _part(
        self, about: Tensors, own: Any, ranks: tuple[int, ...], where: torch.device
    ) -> tuple[reduction.Part, tuple[Any, torch.device | str]]:
        op = self._operator.name
        device: torch.device | str = about.device_type
        operand = None
        if own is not ABSENT:
            operand = flat_of(own, op).to(where)
            device = own.device if isinstance(own, torch.Tensor) else device
        result, flat = None, None
        if self._is_taker:
            result, flat = room_for(about, op, where)
        wide = elementwise.wide_dtype(op, about.dtype, self._options.dtype)
        dtype = elementwise.operand_dtype(op, about.dtype)
        part = reduction.Part(
            operand,
            flat,
            dtype,
            elementwise.result_dtype(op, about.dtype),
            about.numel,
            ranks,
            lambda operands, into: elementwise.combine(op, operands, into, wide),
            (dtype, wide, ranks),
        )
        return part, (result, self._call.device or device)


def _path(structure: Any, at: int) -> str:
    return [path for path, _ in structures.leaves_of(structure)][at]


def _is_large(leaf: Leaf) -> bool:
    return tensors_of(leaf.description) is not None


def _folded(operator: Operator, leaf: Leaf, values: Sequence[Any], options: Leafwise) -> Any:
    """One leaf of all ranks that have it, combined here."""
    about = tensors_of(leaf.description)
    ranks = list(leaf.places)
    if about is not None:
        return _tensors_folded(operator.name, about, values, options)
    if structures.is_constant(leaf.description):
        for rank, value in zip(ranks, values, strict=True):
            if type(value) is not type(values[0]) or value != values[0]:
                raise DifferenceError("", (ranks[0], rank), f"{values[0]!r} and {value!r}")
        return values[0]
    combined = operator.prepare(values[0], ranks[0])
    for rank, value in zip(ranks[1:], values[1:], strict=True):
        combined = operator.combine(combined, operator.prepare(value, rank))
    return operator.finish(combined, len(values))


def _tensors_folded(op: str, about: Tensors, values: Sequence[Any], options: Leafwise) -> Any:
    flats = [flat_of(value, op) for value in values]
    device = flats[0].device
    result, into = room_for(about, op, device)
    wide = elementwise.wide_dtype(op, about.dtype, options.dtype)
    elementwise.combine(op, [flat.to(device) for flat in flats], into, wide)
    return result
