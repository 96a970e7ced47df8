"""What arrives in a reduction of leaves: operands at one rank, and its answer at all others.

Both say what a rank allocates, reads and builds, so each is checked as a whole before any of that.
Knows structures; knows no messages.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from objcomm import structures
from objcomm.codecs.budget import Budget, Spread, weight_of
from objcomm.errors import DecodeError, shown
from objcomm.leaves import described, tensors_of

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


class Place(NamedTuple):
    """Where an answer arrives.

    Attributes:
        structure: of what this rank gave.
        rank: this one.
        size: number of ranks.
        is_taker: whether this rank gets the results.
        may_follow: whether leaves may follow.
        linked: the type of device that this rank's device link joins; empty if it has none.
        most_nbytes: of leaves that this rank has not given itself.
    """

    structure: Any
    rank: int
    size: int
    is_taker: bool
    may_follow: bool
    linked: str
    most_nbytes: int


def received(plain: Any, place: Place) -> Answer:
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
    """What another rank gives: structure, leaves, and its device link's type of device.

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
    following: Sequence[Any], leaves: Sequence[tuple[Any, bool]], place: Place
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
