"""The error tree: its shape, its facts, and that every error survives pickling."""

import copy
import pickle

import pytest

import objcomm
from objcomm import errors
from objcomm._wire.failure_message import failure_of
from objcomm.errors import RankFailure
from tests.error_samples import EXAMPLES, FAILED, OTHER, SIDE
from tests.indescribable import INDESCRIBABLE


def _all_errors(root: type[BaseException]) -> list[type[BaseException]]:
    children = [each for each in root.__subclasses__() if not issubclass(each, errors.CaughtAs)]
    return [root, *(each for child in children for each in _all_errors(child))]


@pytest.mark.parametrize("cls", _all_errors(errors.ObjcommError), ids=lambda cls: cls.__name__)
def test_every_error_survives_pickling_with_its_facts(cls: type[BaseException]) -> None:
    error, told = EXAMPLES[cls]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        got = pickle.loads(pickle.dumps(error, protocol))  # noqa: S301  # made here
        assert type(got) is cls
        assert vars(got) == vars(error)
        assert got.args == error.args
        assert str(got) == str(error)
    assert str(copy.copy(error)) == str(error)
    for fact in told:
        assert fact in str(error)


@pytest.mark.parametrize("cls", _all_errors(errors.ObjcommError), ids=lambda cls: cls.__name__)
def test_every_error_is_public_and_documented(cls: type[BaseException]) -> None:
    assert getattr(objcomm, cls.__name__) is cls
    assert cls.__name__ in objcomm.__all__
    assert cls.__doc__


def test_the_tree_is_the_documented_one() -> None:
    parents = {
        "UsageError": (errors.ObjcommError, ValueError),
        "NotInGroupError": (errors.UsageError,),
        "MissingDependencyError": (errors.ObjcommError, ImportError),
        "CodecError": (errors.ObjcommError,),
        "EncodeError": (errors.CodecError,),
        "DecodeError": (errors.CodecError,),
        "ForbiddenTypeError": (errors.DecodeError,),
        "WireError": (errors.ObjcommError,),
        "AuthenticationError": (errors.WireError,),
        "DesyncError": (errors.WireError,),
        "TransportError": (errors.ObjcommError, RuntimeError),
        "TransportTimeout": (errors.TransportError, TimeoutError),
        "BrokenGroupError": (errors.TransportError,),
        "CollectiveError": (errors.ObjcommError,),
        "StartError": (errors.ObjcommError, RuntimeError),
        "LaunchError": (errors.ObjcommError, RuntimeError),
    }
    for name, bases in parents.items():
        assert getattr(errors, name).__bases__ == bases
    assert len(_all_errors(errors.ObjcommError)) == len(parents) + 1


@pytest.mark.parametrize(
    ("lacking", "told"),
    [
        ("pandas", "the sender can import the module 'pandas', this process cannot: install it"),
        ("__main__:Config", "the sender defines 'Config' in its program or notebook"),
        ("models.net:Head", "install the same version of 'models' on every rank"),
        ("", "cannot decode what arrived: why"),
    ],
)
def test_what_no_rank_sent_is_the_senders(lacking: str, told: str) -> None:
    error = errors.DecodeError("pickle", "why", lacking)
    assert told in str(error)
    assert error.origin is None


def test_the_first_to_say_whose_object_it_was_knows_best() -> None:
    error = errors.sent_at(errors.DecodeError("pickle", "why"), SIDE)
    assert errors.sent_at(error, OTHER).origin == SIDE


def test_failures_cannot_be_changed_from_outside() -> None:
    failures = {2: FAILED}
    error = errors.CollectiveError("gather", failures)
    failures.clear()
    assert list(error.failures) == [2]


def test_several_failures_are_told_in_rank_order() -> None:
    other = RankFailure(0, "builtins.KeyError", "'k'", "Traceback of zero")
    text = str(errors.CollectiveError("gather", {2: FAILED, 0: other}))
    assert text.index("rank 0: builtins.KeyError") < text.index("rank 2: builtins.ValueError")
    assert "Traceback of zero" in text


@pytest.mark.parametrize(
    "other", [ValueError, IndexError, KeyError, RuntimeError, AttributeError, OSError]
)
def test_an_error_may_also_be_what_another_library_raised(other: type[Exception]) -> None:
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


def test_other_ranks_are_told_the_class_that_a_programs_argument_raised_elsewhere() -> None:
    argument = errors.caught_as(errors.UsageError("too short"), IndexError)
    assert failure_of(argument, 1).type_name == "IndexError"
    assert failure_of(argument, 1).message == "too short"
    # What a region reports about a call inside it stays objcomm's error.
    heard = errors.caught_as(errors.CollectiveError("gather", {2: FAILED}), IndexError)
    assert failure_of(heard, 1).type_name == "objcomm.CollectiveError"


@pytest.mark.parametrize("name", INDESCRIBABLE)
def test_any_exception_can_be_described(name: str) -> None:
    error = INDESCRIBABLE[name]()
    failure = failure_of(error, 1)
    assert errors.text_of(error).partition(": ")[0] == name
    assert failure.type_name.rpartition(".")[2] == name
    assert failure.traceback
