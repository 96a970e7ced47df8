"""Named reductions, leaf by leaf, of a number, a tensor, or containers of them.

First, every rank sends its structure and all small leaves to one rank. That rank compares the
structures, folds the leaves it received, and answers all ranks with an error, or with the results
and the list of leaves still to come. Then all ranks combine the large tensors together. A received
structure or answer determines what a rank allocates, reads and builds, so it is validated as a
whole before any of that.
"""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from objcomm._algorithms import routes, tensor_reduction
from objcomm._algorithms.exchange import Exchange
from objcomm._algorithms.parts import Part
from objcomm._algorithms.tensor_reduction import reduce_on_device
from objcomm._calls.call import Call
from objcomm._codecs.tensors import resize_locks
from objcomm._collectives.gather import answered
from objcomm._collectives.reduction import operators, structures
from objcomm._collectives.reduction.operators import Operator
from objcomm._collectives.reduction.structures import Leaf, Tensors, refuse, tensors_of
from objcomm._config import settings
from objcomm._wire.failure_message import DifferenceError
from objcomm._wire.header import Status
from objcomm._wire.message import Message
from objcomm.errors import UsageError, shown

_OPERAND = ("structure", "leaves", "linked")
_HOST = torch.device("cpu")

# Up to this many bytes of tensors go with the structure; those of all ranks fit into one window.
_INLINE_NBYTES = 16 << 10


class Answer(NamedTuple):
    """The outcome of a reduction's first round; sent as a plain tuple.

    Attributes:
        structure: all ranks' structures merged; None if every rank has the same one.
        folded: the results of the leaves that do not follow.
        following: number and ranks of each leaf that all ranks combine afterwards.
        linked: the device type that every rank's device link connects; empty if there is none.
    """

    structure: Any
    folded: Sequence[Any]
    following: Sequence[tuple[int, tuple[int, ...]]]
    linked: str


class Destination(NamedTuple):
    """What an answer must fit on this rank.

    Attributes:
        structure: the structure of this rank's operand.
        rank: this rank.
        size: number of ranks.
        is_taker: whether this rank gets the results.
        may_follow: whether leaves may be combined after the answer.
        linked: the device types of this rank's device links, joined by commas; may be empty.
        most_nbytes: limit for the total size of the leaves that this rank did not contribute.
    """

    structure: Any
    rank: int
    size: int
    is_taker: bool
    may_follow: bool
    linked: str
    most_nbytes: int


def received(plain: Any, place: Destination) -> Answer:
    """Validate a received answer.

    Args:
        plain: the decoded object.
        place: what it must fit.

    Raises:
        DecodeError: it does not fit.
    """
    if not isinstance(plain, (tuple, list)) or len(plain) != len(Answer._fields):
        refuse("it is not an answer to a reduction")
    answer = Answer(*plain)
    if place.structure is None:
        refuse("this rank gave nothing")
    if answer.structure is None:
        _, leaves = structures.merge([place.structure] * 2, may_lack=False)
    else:
        leaves = structures.checked(answer.structure, place.structure)
    if not all(isinstance(each, (tuple, list)) for each in (answer.folded, answer.following)):
        refuse("its results are not a list")
    if type(answer.linked) is not str or answer.linked not in {"", place.linked}:
        refuse(f"all ranks are joined by {shown(answer.linked)}, but this one is not")
    _check_following(answer.following, leaves, place)
    if place.is_taker and len(answer.folded) != len(leaves) - len(answer.following):
        refuse("it does not have one result for each leaf")
    return answer


def operand(plain: Any) -> tuple[Any, list[Any], str]:
    """Validate another rank's operand: structure, leaves, and the types of its device links.

    A leaf that follows later is None.

    Raises:
        DecodeError: they do not belong together.
    """
    if not (isinstance(plain, (tuple, list)) and len(plain) == len(_OPERAND)):
        refuse("it is not an operand")
    structure, values, linked = plain
    if not isinstance(linked, str):
        refuse(f"{shown(linked)} is not a device type")
    leaves = structures.checked(structure)
    if not isinstance(values, list) or len(values) != len(leaves):
        refuse("its leaves do not match its structure")
    for (description, _), value in zip(leaves, values, strict=True):
        if tensors_of(description) is not None and value is not None:
            found = structures.described(value)
            if found is None or found[0][:3] != description[:3]:
                refuse("a leaf does not match its description")
    return structure, values, linked


def _check_following(following: Sequence[Any], leaves: Sequence[Leaf], place: Destination) -> None:
    nbytes, last = 0, -1
    if following and not place.may_follow:
        refuse("it announces leaves that have already been sent")
    for each in following:
        if not (isinstance(each, (tuple, list)) and len(each) == len(("leaf", "ranks"))):
            refuse("it announces something that is not a leaf")
        at, ranks = each
        if type(at) is not int or not last < at < len(leaves):
            refuse(f"there is no leaf {shown(at)} to follow")
        last = at
        about, is_own = tensors_of(leaves[at].description), 1 in leaves[at].places
        if about is None:
            refuse(f"leaf {at} is announced, but is not a tensor")
        if not _are_ranks(ranks, place.size) or (place.rank in ranks) != is_own:
            refuse(f"leaf {at} comes from impossible ranks")
        nbytes += 0 if is_own else about.nbytes
    if nbytes > place.most_nbytes:
        refuse(
            f"leaves of {nbytes} bytes are announced, more than the limit of {place.most_nbytes}; "
            "see objcomm.configure(max_nbytes=)"
        )


def _are_ranks(ranks: Any, size: int) -> bool:
    if not isinstance(ranks, (tuple, list)) or {type(rank) for rank in ranks} != {int}:
        return False
    return list(ranks) == sorted(set(ranks)) and ranks[0] >= 0 and bool(ranks[-1] < size)


def alone(operator: Operator, obj: Any) -> Any:
    """Reduce a single operand."""
    structure, values = structures.describe(obj, operator, 0)
    _, leaves = structures.merge([structure], may_lack=False)
    results = [_folded(operator, leaf, [value]) for leaf, value in zip(leaves, values, strict=True)]
    return structures.rebuild(structure, obj, results)


class TreeReduction:
    """One reduction, as seen by this rank."""

    def __init__(self, call: Call, operator: Operator, obj: Any, root: int | None) -> None:
        """Describe this rank's operand; an error becomes this rank's failure."""
        self._call = call
        self._operator = operator
        self._root = root
        self._own: Any = None
        self._described: list[Any] = []
        self._given: list[Any] = []
        self._place = Destination(
            structure=None,
            rank=call.rank,
            size=call.size,
            is_taker=root in {None, call.rank},
            may_follow=operator.may_lack,
            linked=call.exchange.device.linked,
            most_nbytes=settings().max_nbytes,
        )
        self._mine = call.message(obj, self._describe)
        self._answer: Answer | None = None
        self._followed: dict[int, Any] = {}

    def _describe(self, obj: Any) -> tuple[Any, list[Any], str]:
        structure, leaves = structures.describe(obj, self._operator, self._call.rank)
        self._place = self._place._replace(structure=structure)
        self._locks = [resize_locks(leaf) for leaf in leaves]
        # Copies the containers: the caller of an asynchronous call may modify its own meanwhile.
        self._own = structures.rebuild(structure, obj, leaves)
        self._described = described = [each for _, each, _ in structures.walk(structure)]
        nbytes = sum(about.nbytes for about in map(tensors_of, described) if about is not None)
        # Data sent outside of messages is not signed.
        if nbytes > _INLINE_NBYTES and self._call.exchange.gate.signer is None:
            self._place = self._place._replace(may_follow=True)
            pairs = zip(leaves, described, strict=True)
            leaves = [value if tensors_of(each) is None else None for value, each in pairs]
        self._given = leaves
        return structure, leaves, self._place.linked

    def run(self, exchange: Exchange) -> Message:
        """Run the traffic; results go to ``root``, or to all ranks if it is None."""
        root = self._root
        hub = routes.HUB if root is None else root

        def answer(messages: list[Message]) -> tuple[Any, ...]:
            found = self._answer = self._merged(messages)
            # Ranks that get no result do not need the folded leaves.
            return tuple(found if root is None else found._replace(folded=()))

        message = answered(self._call, exchange, self._mine, answer, hub)
        if self._place.may_follow and message.header.status == Status.VALUE:
            self._follow(exchange, self._read(message))
        return message

    def value(self, message: Message) -> Any:
        """Return the result on a rank that gets one, otherwise None."""
        self._call.raise_failures([message])
        if not self._place.is_taker:
            return None
        answer = self._read(message)
        followed, folded = self._followed, iter(answer.folded)
        count = len(answer.folded) + len(answer.following)
        results = [followed[at] if at in followed else next(folded) for at in range(count)]
        return structures.rebuild(answer.structure or self._place.structure, self._own, results)

    def _read(self, message: Message) -> Answer:
        if self._answer is None:
            self._answer = received(self._call.decode(message), self._place)
        return self._answer

    def _merged(self, messages: list[Message]) -> Answer:
        own = self._place.structure, self._own_leaves(), self._place.linked
        found = [
            own if each is self._mine else operand(self._call.decode(each)) for each in messages
        ]
        given = [structure for structure, _, _ in found]
        structure, leaves = structures.merge(given, may_lack=self._operator.may_lack)
        folded, following = [], []
        for at, leaf in enumerate(leaves):
            values = [found[rank][1][place] for rank, place in leaf.places.items()]
            if tensors_of(leaf.description) and any(value is None for value in values):
                following.append((at, tuple(leaf.places)))
            else:
                folded.append(self._fold(structure, at, leaf, values))
        is_same = all(each == structure for each in given)
        linked, *others = {each for _, _, each in found}
        answer = Answer(None if is_same else structure, folded, following, "" if others else linked)
        return received(answer, self._place) if self._operator.may_lack else answer

    def _own_leaves(self) -> list[Any]:
        """Return this rank's leaves; copy those that an operator may modify."""
        return [
            self._call.copy(value) if structures.kind_of(each) == structures.OBJECT else value
            for value, each in zip(self._given, self._described, strict=True)
        ]

    def _fold(self, structure: Any, at: int, leaf: Leaf, values: list[Any]) -> Any:
        try:
            return _folded(self._operator, leaf, values)
        except Exception as error:
            path, _, _ = next(itertools.islice(structures.walk(structure), at, None))
            text = structures.text_of(path)
            if isinstance(error, DifferenceError):
                raise DifferenceError(text, error.ranks, error.reason) from None
            raise UsageError(f"{text}: {error}") from error

    def _follow(self, exchange: Exchange, answer: Answer) -> None:
        """Combine the large leaves together with the other ranks."""
        leaves = list(structures.walk(answer.structure or self._place.structure, self._own))
        rooms = {}
        on_host: list[Part] = []
        on_device: list[Part] = []
        for at, ranks in answer.following:
            _, description, own = leaves[at]
            about: Any = tensors_of(description)  # checked: only tensors follow
            where = None
            if not about.is_array and len(ranks) == exchange.size:
                where = exchange.device.joined(about.device_type, answer.linked)
            part, rooms[at] = self._part(about, own, tuple(ranks), where or _HOST)
            (on_host if where is None else on_device).append(part)
        tensor_reduction.reduce_tensors(exchange, on_host, self._root)
        reduce_on_device(exchange, on_device)
        for at, (result, device) in rooms.items():
            is_tensor = isinstance(result, torch.Tensor)
            self._followed[at] = result.to(device) if is_tensor else result

    def _part(
        self, about: Tensors, own: Any, ranks: tuple[int, ...], where: torch.device
    ) -> tuple[Part, tuple[Any, torch.device | str]]:
        op = self._operator.name
        dtype = operators.operand_dtype(op, about.dtype)
        wide = operators.wide_dtype(op, about.dtype, self._operator.dtype)
        result, flat = (
            structures.room_for(about, op, where) if self._place.is_taker else (None, None)
        )
        part = Part(
            None if own is structures.ABSENT else structures.flat_of(own, op).to(where),
            flat,
            dtype,
            operators.result_dtype(op, about.dtype),
            wide,
            about.numel,
            ranks,
            partial(operators.combine_tensors, op, wide=wide),
            (dtype, wide, ranks, where.type),
        )
        device = own.device if isinstance(own, torch.Tensor) else about.device_type
        return part, (result, self._call.device or device)


def _folded(operator: Operator, leaf: Leaf, values: Sequence[Any]) -> Any:
    """Combine one leaf of all ranks that have it, on this rank."""
    about, op, ranks = tensors_of(leaf.description), operator.name, list(leaf.places)
    if about is not None:
        flats = [structures.flat_of(value, op) for value in values]
        result, into = structures.room_for(about, op, flats[0].device)
        wide = operators.wide_dtype(op, about.dtype, operator.dtype)
        operators.combine_tensors(op, [flat.to(into.device) for flat in flats], into, wide)
        return result
    pairs = zip(ranks, values, strict=True)
    if structures.kind_of(leaf.description) == structures.CONSTANT:
        for rank, value in pairs:
            if type(value) is not type(values[0]) or value != values[0]:
                raise DifferenceError("", (ranks[0], rank), f"{values[0]!r} and {value!r}")
        return values[0]
    return operator.fold((operator.prepare(value, rank) for rank, value in pairs), len(values))
