"""One rank's failure, as other ranks show it: the user's line, and nothing twice."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import objcomm
from objcomm import CollectiveError
from tests.group.helpers import RefusesToPickle, assert_group_works, error_in
from tests.ranks import ranks
from tests.workers import here

_OF_OBJCOMM = f'File "{Path(objcomm.__file__).parent}'


def _read(*_: object) -> Any:
    raise LookupError("no such shard")  # the user's line


def _is_last() -> bool:
    return objcomm.rank() == objcomm.world_size() - 1


def _unfit(text: str) -> object:
    """An object that can't be encoded, on the last rank."""
    return RefusesToPickle(ValueError(text)) if _is_last() else 1


def _refused() -> object:
    with objcomm.configure(max_nbytes=100_000 if _is_last() else 1 << 30):
        return objcomm.broadcast(bytes(4_000_000))  # the user's line


def _in_a_block() -> None:
    with objcomm.fail_together():
        if _is_last():
            _read()
        objcomm.barrier()


# In each, the last rank fails and every rank raises.
CALLS: dict[str, Callable[[], object]] = {
    "an object that can't be encoded": lambda: objcomm.all_gather(_unfit("no")),  # the user's line
    "the same in flight": lambda: objcomm.all_gather(  # the user's line
        _unfit("no"), async_op=True
    ).wait(),
    "a long text": lambda: objcomm.all_gather(_unfit("é" * 1_000_000)),  # the user's line
    "a callback": lambda: objcomm.reduce_and_broadcast(_read if _is_last() else int, sum),
    "a callback of an operation in flight": lambda: objcomm.all_reduce(  # the user's line
        _Refuses(), _Refuses.combine, async_op=True
    ).wait(),
    "a function of one rank": lambda: objcomm.compute_and_broadcast(_read, 1),
    "a block": _in_a_block,
    "a message that is refused": _refused,
    "values that differ": lambda: objcomm.agree(_is_last()),  # the user's line
    "names that differ": lambda: objcomm.metrics.average_metrics(  # the user's line
        {"mse" if _is_last() else "loss": 1.0}
    ),
    "structures that differ": lambda: objcomm.all_reduce(  # the user's line
        {"loss": 1.0 if _is_last() else torch.ones(2)}, "sum"
    ),
    "models that differ": lambda: objcomm.models.broadcast_tensors(  # the user's line
        [torch.ones(3 if _is_last() else 2)]
    ),
    "colours that differ": lambda: objcomm.split("a" if _is_last() else 1),  # the user's line
}


class _Refuses:
    """Its operator fails on whichever rank runs it."""

    def combine(self, _: object) -> Any:
        raise LookupError("no such shard")


@ranks(2)
@pytest.mark.parametrize("name", CALLS)
def test_every_failure_shows_the_users_line_and_no_objcomm_frame(name: str) -> None:
    objcomm.barrier()
    error = error_in(objcomm.ObjcommError, CALLS[name])
    shown = "".join(traceback.format_exception(error))
    assert f'File "{__file__}", line ' in shown
    assert _OF_OBJCOMM not in shown
    assert "objcomm._" not in shown
    # The rank that refuses a message raises its own error.
    is_own = name == "a message that is refused" and here().rank == 1
    assert isinstance(error, objcomm.WireError if is_own else CollectiveError)
    for failure in error.failures.values() if isinstance(error, CollectiveError) else ():
        # A path that comes from another rank may lack its beginning.
        assert f'{Path(__file__).name}", line ' in failure.traceback.partition("\n")[0]
        assert _OF_OBJCOMM not in failure.traceback
        if "Traceback (most" in failure.traceback:
            assert "the user's line" in failure.traceback
            assert ("\n  [objcomm: " in failure.traceback) == (name != "a block")
    assert_group_works()


@ranks(2)
def test_a_failed_message_says_where_it_was_sent() -> None:
    def send() -> None:
        objcomm.send(RefusesToPickle(ValueError("no")), 1)  # the user's line

    error = error_in(CollectiveError, send if here().rank == 0 else lambda: objcomm.recv(0))
    assert "the user's line" in error.failures[0].traceback
    assert _OF_OBJCOMM not in error.failures[0].traceback
    assert_group_works()


@ranks(1)
def test_a_world_of_one_shows_the_users_line_too() -> None:
    for call in (
        lambda: objcomm.run_on_main(_read),
        lambda: objcomm.send(RefusesToPickle(ValueError("no")), 0),
    ):
        failure = error_in(CollectiveError, call).failures[0]
        assert f'File "{__file__}", line ' in failure.traceback.partition("\n")[0]
        assert _OF_OBJCOMM not in failure.traceback


@ranks(3)
def test_the_rank_that_failed_shows_its_traceback_once() -> None:
    error = error_in(CollectiveError, lambda: objcomm.compute_and_broadcast(_read, 1))
    shown = "".join(traceback.format_exception(error))
    assert shown.count("in _read\n") == 1
    assert shown.count("Traceback of rank 1") == (here().rank != 1)
    assert "in _read" in error.failures[1].traceback  # still available on request
    assert_group_works()


@ranks(3)
def test_each_of_several_ranks_that_failed_shows_the_tracebacks_of_the_others() -> None:
    def read() -> Any:
        raise LookupError(f"shard {here().rank}")

    error = error_in(
        CollectiveError, lambda: objcomm.reduce_and_broadcast(read if here().rank else int, sum)
    )
    assert sorted(error.failures) == [1, 2]
    shown = "".join(traceback.format_exception(error))
    others = [rank for rank in (1, 2) if rank != here().rank]
    assert [rank for rank in range(3) if f"Traceback of rank {rank}:" in shown] == others
    assert_group_works()


@ranks(2)
def test_an_error_that_a_call_in_a_block_raised_is_shown_once() -> None:
    def block() -> None:
        with objcomm.fail_together():
            objcomm.run_on_main(_read)

    shown = "".join(traceback.format_exception(error_in(CollectiveError, block)))
    assert shown.count("in _read\n") == 1
    assert_group_works()
