"""Named reductions, leaf by leaf: of a number, a tensor, or containers of them.

First every rank's structure meets at one rank, together with all leaves that are small. That rank
compares the structures, folds the leaves it has, and answers all: with an error, or with the
results and with what is to follow. Then all ranks combine the large tensors together. What arrives
says what a rank allocates, reads and builds, so it is checked as a whole before any of that.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from objcomm._algorithms import routes, tensor_reduction
from objcomm._algorithms.exchange import Exchange
from objcomm._algorithms.parts import Part
from objcomm._algorithms.tensor_reduction import reduce_on_device
from objcomm._calls.call import Call
from objcomm._codecs.nesting import Budget, Spread, weight_of
from objcomm._codecs.tensors import resize_locks
from objcomm._collectives.gather import answered
from objcomm._collectives.reduction import elementwise, structures
from objcomm._collectives.reduction.operators import Operator
from objcomm._collectives.reduction.structures import (
    ABSENT,
    Leaf,
    Tensors,
    described,
    flat_of,
    room_for,
    tensors_of,
)
from objcomm._config import settings
from objcomm._wire.failure_message import DifferenceError
from objcomm._wire.header import Status
from objcomm._wire.message import Message
from objcomm.errors import DecodeError, UsageError, shown

_OPERAND = ("structure", "leaves", "linked")


class Answer(NamedTuple):
    """What the first round of a reduction has come to; plain tuples travel.

    Attributes:
        structure: of all ranks together; None if every rank has the same.
        folded: the results of the leaves that are not to follow.
        following: number and ranks of each leaf that is combined by all ranks afterwards.
        linked: the type of device that every rank's device link joins; empty if there is none.
    """

    structure: Any
    folded: Sequence[Any]
    following: Sequence[tuple[int, tuple[int, ...]]]
    linked: str


class Destination(NamedTuple):
    """Where an answer arrives.

    Attributes:
        structure: of what this rank gave.
        rank: this one.
        size: number of ranks.
        is_taker: whether this rank gets the results.
        may_follow: whether leaves may follow.
        linked: the types of device that this rank's device links join, with commas; may be empty.
        most_nbytes: of leaves that this rank has not given itself.
    """

    structure: Any
    rank: int
    size: int
    is_taker: bool
    may_follow: bool
    linked: str
    most_nbytes: int


def received(plain: Any, place: Destination) -> Answer:
    """The answer that arrived.

    Args:
        plain: what was decoded.
        place: what it must fit.

    Raises:
        DecodeError: it does not fit.
    """
    if not isinstance(plain, (tuple, list)) or len(plain) != len(Answer._fields):
        _refuse("it is no answer to a reduction")
    answer = Answer(*plain)
    if place.structure is None:
        _refuse("this rank gave nothing")
    if answer.structure is None:
        leaves = [(each, True) for _, each in structures.leaves_of(place.structure)]
    else:
        leaves = _Checking(must_make=True).leaves_of(answer.structure, place.structure)
    if not all(isinstance(each, (tuple, list)) for each in (answer.folded, answer.following)):
        _refuse("its results are no list")
    if type(answer.linked) is not str or answer.linked not in {"", place.linked}:
        _refuse(f"all ranks are joined by {shown(answer.linked)}, but this one is not")
    _check_following(answer.following, leaves, place)
    if place.is_taker and len(answer.folded) != len(leaves) - len(answer.following):
        _refuse("it has not one result for each leaf")
    return answer


def operand(plain: Any) -> tuple[Any, list[Any], str]:
    """What another rank gives: structure, leaves, and its device links' types of device.

    A leaf that follows is None.

    Raises:
        DecodeError: they do not belong together.
    """
    if not (isinstance(plain, (tuple, list)) and len(plain) == len(_OPERAND)):
        _refuse("it is no operand")
    structure, values, linked = plain
    if not isinstance(linked, str):
        _refuse(f"{shown(linked)} is no type of device")
    leaves = _Checking(must_make=False).leaves_of(structure, None)
    if not isinstance(values, list) or len(values) != len(leaves):
        _refuse("it has other leaves than its structure")
    for (description, _), value in zip(leaves, values, strict=True):
        about = tensors_of(description)
        if about is not None and value is not None:
            found = described(value)
            if found is None or found[0][:3] != description[:3]:
                _refuse("a leaf is not what is said of it")
    return structure, values, linked


def _check_following(
    following: Sequence[Any], leaves: Sequence[tuple[Any, bool]], place: Destination
) -> None:
    nbytes, last = 0, -1
    if following and not place.may_follow:
        _refuse("leaves are to follow that travelled already")
    for each in following:
        if not (isinstance(each, (tuple, list)) and len(each) == len(("leaf", "ranks"))):
            _refuse("what is to follow is no leaf")
        at, ranks = each
        if type(at) is not int or not last < at < len(leaves):
            _refuse(f"there is no leaf {shown(at)} to follow")
        last = at
        description, is_own = leaves[at]
        about = tensors_of(description)
        if about is None:
            _refuse(f"leaf {at} is to follow, but is no tensor")
        if not _are_ranks(ranks, place.size) or (place.rank in ranks) != is_own:
            _refuse(f"leaf {at} follows from ranks that make no sense")
        nbytes += 0 if is_own else about.nbytes
    if nbytes > place.most_nbytes:
        _refuse(
            f"leaves of {nbytes} bytes are to follow, more than the limit of {place.most_nbytes}; "
            "see objcomm.configure(max_nbytes=)"
        )


def _are_ranks(ranks: Any, size: int) -> bool:
    return (
        isinstance(ranks, (tuple, list))
        and len(ranks) > 0
        and all(type(rank) is int and 0 <= rank < size for rank in ranks)
        and list(ranks) == sorted(set(ranks))
    )


class _Checking:
    """Goes through a structure beside this rank's own.

    Attributes:
        leaves: each one's description, and whether this rank has it.
    """

    def __init__(self, *, must_make: bool) -> None:
        self.leaves: list[tuple[Any, bool]] = []
        self._must_make = must_make
        self._budget = Budget("msgpack", memoryview(b""), ())

    def leaves_of(self, node: Any, own: Any) -> list[tuple[Any, bool]]:
        """The leaves of the outermost node."""
        self._node(node, own)
        return self.leaves

    def _node(self, node: Any, own: Any) -> None:
        if isinstance(node, tuple) and len(node) == len(("number", "description")):
            self._leaf(node[0], node[1], own)
            return
        kinds = (str, str, tuple, tuple)
        if not isinstance(node, tuple) or len(node) != len(kinds):
            _refuse("it holds no structure")
        if not all(isinstance(each, kind) for each, kind in zip(node, kinds, strict=True)):
            _refuse("a container has no type, or its members are no list")
        kind, type_name, keys, children = node
        if not all(map(structures.is_key, keys)):
            _refuse("a key is no plain data")
        theirs = _by_key(keys, children, self._budget)
        if own is None:
            if self._must_make and not structures.can_be_made(kind, type_name, keys):
                _refuse(f"this rank can make no {type_name!r}")
            members: dict[Any, Any] = {}
        else:
            if own[:2] != (kind, type_name):
                _refuse(f"it has a {type_name!r} where this rank gave another type")
            members = _by_key(own[2], own[3], self._budget)
            if not _fit(kind, keys, own[2]):
                _refuse(f"a {type_name!r} has other members than this rank gave")
        for key, child in theirs.items():
            self._node(child, members.get(key))

    def _leaf(self, number: Any, description: Any, own: Any) -> None:
        if type(number) is not int or number != len(self.leaves):
            _refuse(f"a leaf has the number {shown(number)}")
        if tensors_of(description) is None and not structures.is_plain(description):
            _refuse("a leaf is described by what is no description")
        if own is not None and (
            len(own) != len(("number", "description")) or own[1] != description
        ):
            _refuse(f"leaf {number} is not what this rank gave")
        self.leaves.append((description, own is not None))


def _by_key(keys: tuple[Any, ...], children: tuple[Any, ...], budget: Budget) -> dict[Any, Any]:
    try:
        Spread(budget, weight_of).add(keys)
        members = dict(zip(keys, children, strict=True))
    except (TypeError, ValueError):
        _refuse("a container's keys are none, or not as many as its members")
    if len(members) != len(keys):
        _refuse("a key stands twice")
    return members


def _fit(kind: str, keys: tuple[Any, ...], own: tuple[Any, ...]) -> bool:
    return set(keys) >= set(own) if kind == structures.MAPPING else keys == own


def _refuse(reason: str) -> NoReturn:
    raise DecodeError("msgpack", f"a part of a reduction: {reason}")


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


def options_for(
    operator: Operator, dtype: torch.dtype | None, missing: str, operation: str
) -> Leafwise:
    """The options from a call's arguments.

    Args:
        operator: what reduces.
        dtype: as the user gave it, like the next.
        missing: ``"error"`` or ``"skip"``.
        operation: what the user has called, for an error's text.

    Raises:
        UsageError: they make no sense, or not for this operator.
    """
    if missing not in ("error", "skip"):  # no set: a list has no hash
        raise UsageError(f"{operation}: missing={missing!r} must be 'error' or 'skip'")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise UsageError(f"{operation}: dtype={dtype!r} must be a torch.dtype or None")
    if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        raise UsageError(
            f"{operation}: dtype={dtype} has no fractions: integers are added up as they are"
        )
    if dtype is not None and operator.name not in {"sum", "prod", "mean"}:
        raise UsageError(
            f"{operation}: dtype= is for sum, prod and mean; {operator.name!r} adds nothing up"
        )
    if missing == "skip" and not operator.is_leafwise:
        raise UsageError(f"{operation}: missing='skip' is for the named ops that go leaf by leaf")
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
        self._own: Any = None
        self._structure: Any = None
        self._leaves: list[Any] = []
        self._mine_follows = False
        self._mine = call.message(obj, self._describe)
        self._answer: Answer | None = None
        self._followed: dict[int, Any] = {}
        self._is_taker = True

    def _describe(self, obj: Any) -> tuple[Any, list[Any], str]:
        structure, leaves = structures.describe(obj, self._operator, self._call.rank)
        self._structure, self._leaves = structure, leaves
        self._locks = [resize_locks(leaf) for leaf in leaves]
        # Containers of its own: an asynchronous call's caller may change theirs meanwhile.
        self._own = structures.rebuild(structure, obj, leaves)
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

    def _place(self) -> Destination:
        return Destination(
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
        on_host: list[Part] = []
        on_device: list[Part] = []
        for at, ranks in answer.following:
            about = tensors_of(descriptions[at])
            if about is None:
                raise UsageError("an answer names a leaf that is no tensor")
            where = None
            if not about.is_array and len(ranks) == exchange.size:
                where = exchange.device.joined(about.device_type, answer.linked)
            part, rooms[at] = self._part(about, own[at], tuple(ranks), where or _HOST)
            (on_host if where is None else on_device).append(part)
        tensor_reduction.reduce_tensors(exchange, on_host, root)
        reduce_on_device(exchange, on_device)
        for at, (result, device) in rooms.items():
            is_tensor = isinstance(result, torch.Tensor)
            self._followed[at] = result.to(device) if is_tensor else result

    def _part(
        self, about: Tensors, own: Any, ranks: tuple[int, ...], where: torch.device
    ) -> tuple[Part, tuple[Any, torch.device | str]]:
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
        part = Part(
            operand,
            flat,
            dtype,
            elementwise.result_dtype(op, about.dtype),
            about.numel,
            ranks,
            lambda operands, into: elementwise.combine(op, operands, into, wide),
            (dtype, wide, ranks, where.type),
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
