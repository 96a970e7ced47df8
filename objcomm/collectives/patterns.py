"""What the collectives do between a call's arguments and its result; others build on it, too.

Each is the first step of a call that was entered: it encodes. What it returns is the second, to be
called on the spot or given to ``call.run``.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from objcomm.algorithms import routes
from objcomm.algorithms.exchange import Exchange
from objcomm.calls.call import Call
from objcomm.wire.message import Message

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")


def _unchecked(obj: T) -> T:
    return obj


def broadcast_in(call: Call, obj: T, check: Callable[[T], T] = _unchecked) -> Callable[[], T]:
    """``broadcast`` for a call that was already begun.

    Args:
        call: the call.
        obj: what the source shares.
        check: returns it, or raises, on the source; an error travels as that rank's failure.
    """
    if call.is_alone:
        return partial(call.alone, lambda: check(obj))
    mine = call.message(lambda: check(obj)) if call.is_root else None

    def rest() -> T:
        with call.traffic() as exchange:
            message = routes.broadcast(exchange, mine, call.root)
        with call.confirmation():
            call.raise_failures([message])
            return obj if call.is_root else call.decode(message)

    return rest


def gather_in(call: Call, produce: Callable[[], T]) -> Callable[[], list[T] | None]:
    """``gather`` for a call that was already begun.

    Args:
        call: the call.
        produce: gives this rank's contribution; an error travels as this rank's failure.
    """
    if call.is_alone:
        return lambda: [call.alone(produce)]
    own: list[T] = []
    mine = call.message(lambda: kept(own, produce()))

    def rest() -> list[T] | None:
        with call.traffic() as exchange:
            messages = routes.gather(exchange, mine, call.root)
        with call.confirmation():
            call.raise_failures(messages or ())
            return None if messages is None else decode_others(call, messages, *own)

    return rest


def kept(place: list[T], value: T) -> T:
    """Keep what a callback returned: its own rank gets the object itself, no copy."""
    place.append(value)
    return value


def _is_any(_: object) -> bool:
    return True


def decide_in(
    call: Call,
    produce: Callable[[], A],
    decide: Callable[[list[A]], B],
    *,
    is_part: Callable[[Any], bool] = _is_any,
    is_answer: Callable[[Any], bool] = _is_any,
) -> Callable[[], B]:
    """Let one rank compute something of all ranks' contributions, for all.

    Args:
        call: the call.
        produce: gives this rank's contribution; an error travels as this rank's failure.
        decide: called on the group's first rank with all contributions in rank order, once and
            only if every rank has one. What it raises is raised on all ranks; a
            ``DisagreementError`` in the name of the ranks that it blames.
        is_part: whether an object can be what another rank's ``produce`` gave.
        is_answer: whether it can be what ``decide`` gave on the first rank.
    """
    if call.is_alone:
        return partial(call.alone, lambda: decide([produce()]))
    own: list[A] = []
    shared: list[B] = []
    mine = call.message(lambda: kept(own, produce()))

    def answer(messages: list[Message]) -> B:
        return kept(shared, decide(decode_others(call, messages, *own, is_part=is_part)))

    def rest() -> B:
        with call.traffic() as exchange:
            message = answered(call, exchange, mine, answer)
        call.raise_failures([message])
        result: B = shared[0] if shared else call.decode_as(message, is_answer, "such answer")
        return result

    return rest


def answered(
    call: Call,
    exchange: Exchange,
    mine: Message,
    decide: Callable[[list[Message]], object],
    hub: int = routes.HUB,
) -> Message:
    """One rank's answer to the messages of all; every rank calls this in its traffic.

    Args:
        call: the call.
        exchange: its traffic.
        mine: this rank's message.
        decide: gives the answer; called on ``hub`` with all messages in rank order, and only if
            none of them tells of a failure. An error of it travels instead: as that rank's, or, a
            ``DisagreementError`` or ``DifferenceError``, as that of the ranks that it blames.
        hub: which rank; the same on all.
    """
    messages = routes.gather(exchange, mine, hub)
    answer = None
    if messages is not None:
        answer = call.failures(messages) or call.message(lambda: decide(messages), messages)
    return routes.broadcast(exchange, answer, hub)


def decode_others(
    call: Call,
    messages: Sequence[Message],
    own: T,
    *,
    is_part: Callable[[Any], bool] = _is_any,
) -> list[T]:
    """The objects of all ranks, this rank's own being the identical one."""
    return [
        own if rank == call.rank else call.decode_as(message, is_part, "such part")
        for rank, message in enumerate(messages)
    ]


def all_gather_in(
    call: Call, obj: T, check: Callable[[T], T] = _unchecked
) -> Callable[[], list[T]]:
    """``all_gather`` for a call that was already begun.

    Args:
        call: the call.
        obj: this rank's contribution.
        check: returns it, or raises; an error travels as this rank's failure.
    """
    if call.is_alone:
        return lambda: [call.alone(lambda: check(obj))]
    mine = call.message(lambda: check(obj))

    def rest() -> list[T]:
        with call.traffic() as exchange:
            messages = routes.all_gather(exchange, mine)
        with call.confirmation():
            call.raise_failures(messages)
            return decode_others(call, messages, obj)

    return rest
