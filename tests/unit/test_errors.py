"""The errors: their bases, their facts, and texts that stay short however many ranks they cover."""

import copy
import pickle
from collections.abc import Callable, Iterable

import pytest

import objcomm
from objcomm import errors
from objcomm._wire.failure_message import failure_message, failure_of, failures_in
from objcomm.errors import CYCLE, ObjcommError, Position, RankFailure
from tests.error_samples import EXAMPLES, FAILED, OTHER, SIDE
from tests.indescribable import INDESCRIBABLE
from tests.unit.memory_link import header_of


def _all_errors(root: type[BaseException]) -> list[type[BaseException]]:
    children = [each for each in root.__subclasses__() if not issubclass(each, errors.CaughtAs)]
    return [root, *(each for child in children for each in _all_errors(child))]


@pytest.mark.parametrize("cls", _all_errors(ObjcommError), ids=lambda cls: cls.__name__)
def test_every_error_survives_pickling_with_its_facts(cls: type[BaseException]) -> None:
    error, facts = EXAMPLES[cls]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        got = pickle.loads(pickle.dumps(error, protocol))  # noqa: S301  # made here
        assert type(got) is cls
        assert vars(got) == vars(error)
        assert got.args == error.args
        assert str(got) == str(error)
    assert str(copy.copy(error)) == str(error)
    assert all(fact in str(error) for fact in facts)


@pytest.mark.parametrize("cls", _all_errors(ObjcommError), ids=lambda cls: cls.__name__)
def test_every_error_is_public_and_documented(cls: type[BaseException]) -> None:
    assert getattr(objcomm, cls.__name__) is cls
    assert cls.__name__ in objcomm.__all__
    assert cls.__doc__


def test_the_errors_have_the_documented_bases() -> None:
    parents = {
        "UsageError": (ObjcommError, ValueError),
        "NotInGroupError": (errors.UsageError,),
        "MissingDependencyError": (ObjcommError, ImportError),
        "CodecError": (ObjcommError,),
        "EncodeError": (errors.CodecError,),
        "DecodeError": (errors.CodecError,),
        "ForbiddenTypeError": (errors.DecodeError,),
        "WireError": (ObjcommError,),
        "AuthenticationError": (errors.WireError,),
        "DesyncError": (errors.WireError,),
        "TransportError": (ObjcommError, RuntimeError),
        "TransportTimeout": (errors.TransportError, TimeoutError),
        "BrokenGroupError": (errors.TransportError,),
        "CollectiveError": (ObjcommError,),
        "StartError": (ObjcommError, RuntimeError),
        "LaunchError": (ObjcommError, RuntimeError),
    }
    for name, bases in parents.items():
        assert getattr(errors, name).__bases__ == bases
    assert len(_all_errors(ObjcommError)) == len(parents) + 1


@pytest.mark.parametrize(
    ("lacking", "text"),
    [
        ("pandas", "the sender can import the module 'pandas', this process cannot: install it"),
        ("__main__:Config", "the sender defines 'Config' in its program or notebook"),
        ("models.net:Head", "install the same version of 'models' on every rank"),
        ("", "cannot decode what arrived: why"),
    ],
)
def test_a_decode_error_says_what_this_process_lacks(lacking: str, text: str) -> None:
    error = errors.DecodeError("pickle", "why", lacking)
    assert text in str(error)
    assert error.origin is None


def test_the_first_origin_of_an_object_is_kept() -> None:
    error = errors.sent_at(errors.DecodeError("pickle", "why"), SIDE)
    assert errors.sent_at(error, OTHER).origin == SIDE


def test_failures_cannot_be_changed_from_outside() -> None:
    failures = {2: FAILED}
    error = errors.CollectiveError("gather", failures)
    failures.clear()
    assert list(error.failures) == [2]


@pytest.mark.parametrize(
    "other", [ValueError, IndexError, KeyError, RuntimeError, AttributeError, OSError]
)
def test_an_error_may_also_be_an_instance_of_another_librarys_class(other: type[Exception]) -> None:
    cause = KeyError("its cause")
    error = errors.CollectiveError("gather", {2: FAILED})
    error.__cause__, error.own_rank = cause, 2
    error.add_note("a note")
    made = errors.caught_as(error, other)
    assert isinstance(made, errors.CollectiveError)
    assert isinstance(made, other)
    assert errors.caught_as(made, other) is made
    assert made.__cause__ is cause
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        for got in (made, pickle.loads(pickle.dumps(made, protocol)), copy.copy(made)):  # noqa: S301  # made here
            assert type(got) is type(made)
            assert vars(got) == vars(error)
            assert (got.args, got.failures) == (error.args, error.failures)
            assert str(got).startswith("gather failed on rank 2: builtins.ValueError")
    # A traceback shows the same name as before.
    assert (type(made).__module__, type(made).__qualname__) == ("objcomm", "CollectiveError")


def test_a_failure_names_the_class_that_another_library_would_have_raised() -> None:
    argument = errors.caught_as(errors.UsageError("too short"), IndexError)
    assert failure_of(argument, 1).type_name == "IndexError"
    assert failure_of(argument, 1).message == "too short"
    # What a region reports about a call inside it stays objcomm's error.
    inner = errors.caught_as(errors.CollectiveError("gather", {2: FAILED}), IndexError)
    assert failure_of(inner, 1).type_name == "objcomm.CollectiveError"


@pytest.mark.parametrize("name", INDESCRIBABLE)
def test_any_exception_can_be_described(name: str) -> None:
    error = INDESCRIBABLE[name]()
    failure = failure_of(error, 1)
    assert errors.text_of(error).partition(": ")[0] == name
    assert failure.type_name.rpartition(".")[2] == name
    assert failure.traceback


# Errors of many ranks.

_SIZES = (1, 3, 64, 1000)
_MOST_LETTERS = 60_000
_MOST_LINES = 150  # four tracebacks of 30 lines, and the text around them


def _at(rank: int, line: int, seconds: float = 1.0, *, is_over: bool = False) -> Position:
    return Position(rank, "barrier", 7, -1, f"train.py:{line}", seconds, is_over)


def _failed(rank: int, what: str = "no batches") -> RankFailure:
    lines = "\n".join(f'  File "train.py", line {line}, in work' for line in range(30))
    remote = f"Traceback (most recent call last):\n{lines}\nLookupError: {what}"
    return RankFailure(rank, "LookupError", what, remote)


def _failures(ranks: Iterable[int], what: str = "no batches") -> dict[int, RankFailure]:
    """Failures of these ranks; a brace in ``what`` is replaced by the rank."""
    return {rank: _failed(rank, what.replace("{}", f"{rank}")) for rank in ranks}


def _timeout(
    positions: Iterable[Position], missing: Iterable[int], silent: int = 0
) -> ObjcommError:
    absent = tuple(missing)
    return errors.TransportTimeout("barrier", absent, 5.0, list(positions), absent[:silent])


_LONG = "shard {} " + "é" * 7900
# Errors of these ranks, all alike or all different.
_MADE: dict[str, Callable[[range], ObjcommError]] = {
    "a limit, at one place": lambda ranks: _timeout([_at(each, 1) for each in ranks], [0]),
    "a limit, everywhere": lambda ranks: _timeout([_at(at, at) for at in ranks], ranks[::2]),
    "a limit, silence": lambda ranks: _timeout([], ranks[::2], silent=len(ranks)),
    "different calls": lambda ranks: errors.DesyncError(CYCLE, [_at(at, at) for at in ranks]),
    "lost": lambda ranks: errors.TransportError("gather", tuple(ranks[::2]), "closed"),
    "failed alike": lambda ranks: errors.CollectiveError("gather", _failures(ranks)),
    "failed in other ways": lambda ranks: errors.CollectiveError("gather", _failures(ranks, _LONG)),
    "launched": lambda ranks: errors.LaunchError("work", _failures(ranks[::-1], "shard {}")),
}


@pytest.mark.parametrize("size", _SIZES)
@pytest.mark.parametrize("name", _MADE)
def test_a_text_is_bounded_and_pickles_with_all_facts(name: str, size: int) -> None:
    error = _MADE[name](range(size))
    got = pickle.loads(pickle.dumps(error))  # noqa: S301  # made here
    assert vars(got) == vars(error)
    assert got.args == error.args
    assert str(got) == str(error)
    assert len(str(error)) < _MOST_LETTERS
    assert len(str(error).splitlines()) < _MOST_LINES


def test_consecutive_ranks_are_a_range() -> None:
    assert errors.ranks_text([]) == "a rank"
    assert errors.ranks_text([5]) == "rank 5"
    assert errors.ranks_text([2, 0, 1, 7, 9, 8]) == "ranks 0-2, 7-9"
    assert errors.ranks_text([*range(512), 513]) == "ranks 0-511, 513"
    assert errors.ranks_text(range(0, 6, 2)) == "ranks 0, 2, 4"
    many = errors.ranks_text(range(0, 1000, 2))
    assert many.startswith("ranks 0, 2, 4, ")
    assert many.endswith(", 28, 30 and 484 more")


def test_each_of_few_ranks_has_its_own_position() -> None:
    text = str(_timeout([_at(0, 1), _at(2, 1), _at(1, 1, 0.9, is_over=True)], [1]))
    assert text.startswith(
        "barrier: rank 1 did not arrive within 5 s; "
        "rank 0 is in barrier (call 7) at train.py:1 for 1.0 s; "
        "rank 1 is in no call; its last was barrier (call 7) at train.py:1, 0.9 s ago; "
        "rank 2 is in barrier (call 7) at train.py:1 for 1.0 s; if"
    )


def test_even_a_few_ranks_are_grouped_by_what_they_called() -> None:
    called = [_at(rank, 10 if rank == 1 else 20, rank + 1.0) for rank in range(4)]
    assert errors.position_texts(called, is_past=True) == [
        "rank 1 called barrier (call 7) at train.py:10",
        "ranks 0, 2-3 called barrier (call 7) at train.py:20",
    ]


def test_many_ranks_are_grouped_by_place() -> None:
    waiting = [_at(each, 10, 4.9 + each / 400) for each in range(62)]
    lost = [_at(each, 20, 2.0, is_over=True) for each in (62, 63)]
    silent = (64, 65, 67)
    error = errors.TransportTimeout(
        "barrier", (62, 63, *silent), 5.0, [*lost, *waiting, Position(66, "", 0, -1, "")], silent
    )
    assert str(error).startswith(
        "barrier: ranks 62-65, 67 did not arrive within 5 s; "
        "ranks 0-61 are in barrier (call 7) at train.py:10 for 4.9 to 5.1 s; "
        "ranks 62-63 are in no call; their last was barrier (call 7) at train.py:20, 2.0 s ago; "
        "ranks 64-65, 67: no answer (stopped, out of reach, or in C code that holds Python's lock)"
        "; rank 66 is in "
    )
    assert len(error.positions) == 65
    nowhere = [each._replace(operation="", is_over=True) for each in lost * 3]
    assert errors.position_texts(nowhere)[0].endswith(" are in no call")


def test_ranks_that_compute_at_one_line_are_grouped() -> None:
    loading = [
        _at(each, 20, 9.0, is_over=True)._replace(line="data.py:88 in load", line_seconds=each / 10)
        for each in range(5, 60)
    ]
    elsewhere = _at(60, 20, 9.0, is_over=True)._replace(line="data.py:90 in load")
    last = "last was barrier (call 7) at train.py:20, 9.0 s ago"
    many, one = errors.position_texts([*loading, elsewhere])
    seen = "seen there for 0.5 to 5.9 s"
    assert many == f"ranks 5-59 are in no call, now at data.py:88 in load ({seen}); their {last}"
    assert one == f"rank 60 is in no call, now at data.py:90 in load; its {last}"


def test_the_call_of_the_fewest_ranks_comes_first() -> None:
    many = [_at(each, 10, 4.0) for each in (*range(5), *range(6, 12))]
    odd = _at(5, 20, 1.0)
    late = _at(12, 5, 2.0, is_over=True)._replace(line="data.py:88 in load", line_seconds=1.5)
    text = str(errors.DesyncError("different roots", [*many, odd, late]))
    assert text.startswith(
        "ranks are out of step (different roots): rank 5 called barrier (call 7) at train.py:20; "
        "rank 12 last called barrier (call 7) at train.py:5, 2.0 s ago, "
        "now at data.py:88 in load (seen there for 1.5 s); "
        "ranks 0-4, 6-11 called barrier (call 7) at train.py:10; every"
    )
    two = str(errors.DesyncError("different names", [_at(0, 1), _at(1, 1)._replace(fingerprint=3)]))
    assert ": rank 0 called barrier (call 7) at train.py:1, but rank 1 called barrier" in two
    none = str(errors.DesyncError("…", [odd, Position(1, "", 0, -1, "", is_over=True)]))
    assert "rank 1 made no call, but rank 5 called" in none


def test_the_places_of_missing_ranks_come_first_if_there_are_too_many() -> None:
    error = _timeout((_at(each, each) for each in range(100)), [97, 99])
    text = str(error)
    assert "; rank 97 is in barrier (call 7) at train.py:97" in text
    assert "; rank 99 is in barrier (call 7) at train.py:99" in text
    assert "; ranks 6-96, 98: elsewhere; if" in text
    assert "rank 5 is in" in text


@pytest.mark.parametrize("size", [3, 64, 1000])
def test_ranks_that_failed_alike_show_their_traceback_once(size: int) -> None:
    error = errors.CollectiveError("gather", _failures(range(size)))
    ranks = f"ranks 0-{size - 1}"
    assert error.summary == f"gather failed on {ranks}: LookupError: no batches"
    assert str(error) == f"{error.summary}\n\nTraceback of {ranks}:\n{_failed(0).traceback}"
    # On a rank that failed, Python shows the traceback as that of the cause.
    error.own_rank, error.__cause__ = 1, LookupError("no batches")
    assert str(error) == error.summary


def test_failures_are_listed_in_rank_order_with_the_first_few_tracebacks() -> None:
    failures = {64: _failed(64, "shard 0")} | _failures(range(63, -1, -1), "shard {}")
    text = str(errors.CollectiveError("gather", failures))
    assert text.startswith(
        "gather failed on ranks 0, 64: LookupError: shard 0; rank 1: LookupError: shard 1; "
    )
    assert "rank 7: LookupError: shard 7; ranks 8-63: other errors\n\n" in text
    assert text.count("Traceback (most recent call last)") == 4
    assert "Traceback of ranks 0, 64:" in text
    assert text.endswith("The tracebacks of ranks 4-63 differ from these; see .failures")


def test_a_failure_without_an_exception_shows_its_call() -> None:
    line = '  File "train.py", line 3\n'
    failures = {each: RankFailure(each, "objcomm.UsageError", "no", line) for each in range(9)}
    text = str(errors.CollectiveError("agree", failures))
    summary = "agree failed on ranks 0-8: objcomm.UsageError: no"
    assert text == f"{summary}\n\nCall of ranks 0-8:\n{line[:-1]}"


def test_the_first_failure_of_a_launch_comes_first() -> None:
    others = _failures({*range(64)} - {5}, "rank 5 failed\nmore")
    text = str(errors.LaunchError("work", {5: _failed(5), **others}))
    assert text.startswith(
        "launch: work failed on rank 5: LookupError: no batches; "
        "ranks 0-4, 6-63: LookupError: rank 5 failed\n\nTraceback of rank 5:\n"
    )
    assert text.count("Traceback (most recent call last)") == 2


@pytest.mark.parametrize("size", _SIZES)
def test_a_message_of_many_failures_is_bounded_and_names_all(size: int) -> None:
    failures = [
        RankFailure(each, "LookupError", f"shard {each} {'m' * 7000}", "t" * 8000)
        for each in range(size)
    ]
    message = failure_message(header_of(0), failures)
    assert message.header.meta_nbytes < 1_200_000
    got = failures_in([message])
    assert sorted(got) == list(range(size))
    assert all(each.message.startswith(f"shard {rank} ") for rank, each in got.items())
    if size <= 60:
        assert list(got.values()) == failures
