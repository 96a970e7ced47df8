"""Every sample arrives as it was sent, whatever its size, codec and route."""

import importlib
import sys
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import objcomm
from tests import samples
from tests.cases import case
from tests.group.helpers import assert_group_works
from tests.ranks import ranks
from tests.same import assert_same
from tests.workers import here


@ranks(2)
def test_broadcast_is_exact(codec: str) -> None:
    for name in samples.names(codec):
        with case(name):
            mine = samples.make(name) if objcomm.rank() == 1 else None
            got = objcomm.broadcast(mine, src=1, codec=codec)
            if objcomm.rank() == 0:
                assert_same(got, samples.make(name), sharing=codec == "pickle")


@ranks(3)
def test_all_samples_at_once_are_exact_in_every_operation(codec: str) -> None:
    rank, size = objcomm.rank(), objcomm.world_size()
    want = {name: samples.make(name) for name in samples.names(codec)}
    other = (rank + 1) % size  # all give the same
    gathered = objcomm.all_gather({**want}, codec=codec)
    collected = objcomm.gather({**want}, dst=2, codec=codec)
    arrived = objcomm.scatter([{**want}] * size if rank == 1 else None, src=1, codec=codec)
    joined = objcomm.all_reduce([{**want}], lambda a, b: a + b, codec=codec)
    assert_same(gathered[other], want, sharing=codec == "pickle")
    if collected is not None:
        assert_same(collected[other], want, sharing=codec == "pickle")
    if rank != 1:
        assert_same(arrived, want, sharing=codec == "pickle")
    assert_same(joined[other], want, sharing=False)


@ranks(2)
def test_a_class_of_a_test_module_keeps_its_identity_next_to_a_lambda() -> None:
    mine: Any = (samples.Colour.RED, samples.Run("a", []), lambda x: x)
    colour, run, key = objcomm.broadcast(mine, src=1)
    assert colour is samples.Colour.RED
    assert type(run) is samples.Run
    assert key(3) == 3


@ranks(2)
def test_a_class_of_the_running_script_keeps_its_identity() -> None:
    script = sys.modules["__main__"]
    exec("class Config:\n    lr = 0.1", vars(script))  # noqa: S102  # every rank runs the script
    try:
        got = objcomm.broadcast(script.Config(), src=1)
        assert type(got) is script.Config
    finally:
        del script.Config


@ranks(2)
def test_a_shard_of_a_distributed_tensor_is_refused_with_advice() -> None:
    # Takes most of a second in each process that imports this module.
    from torch.distributed.tensor import Shard, distribute_tensor  # noqa: PLC0415

    shard = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(objcomm.CollectiveError, match="to_local"):
        objcomm.all_gather({"w": shard})
    assert_group_works()


class Rare:
    """A class that one rank registers permanently."""


@ranks(2)
def test_a_class_registered_on_one_rank_only_is_refused_by_the_other() -> None:
    if objcomm.rank() == 0:
        objcomm.register(Rare, encode=lambda _: 1, decode=lambda _: Rare())
        objcomm.broadcast([Rare()], codec="msgpack")
    else:
        with pytest.raises(objcomm.ForbiddenTypeError, match="Rare"):
            objcomm.broadcast(None, codec="msgpack")
    assert_group_works()


@ranks(2)
def test_items_of_record_arrays_keep_their_type_and_fields_their_metadata() -> None:
    np = pytest.importorskip("numpy")
    records = np.rec.array([(1, 2.0)], dtype=[("step", "i4"), ("loss", "f8")])
    for sent in (records, np.array(records), np.zeros(2, [("inner", records.dtype)])):
        got: Any = objcomm.broadcast(sent if objcomm.rank() == 1 else None, src=1)
        assert type(got) is type(sent)
        assert repr(got.dtype) == repr(sent.dtype)
        assert got.tobytes() == sent.tobytes()
    assert objcomm.broadcast(records[0], src=1).step == 1
    noted = np.dtype([("step", np.dtype("i4", metadata={"unit": "s"}))])
    assert objcomm.broadcast(noted, src=1)["step"].metadata == {"unit": "s"}


@ranks(2, disposable=True)
def test_a_class_may_name_a_module_that_is_not_imported_yet() -> None:
    folder = here().folder
    if here().rank == 0:
        (folder / "parts.py").write_text("class Chunk: pass\nChunk.__module__ = 'facade'\n")
        (folder / "facade.py").write_text("from parts import Chunk\n")
    objcomm.barrier()
    sys.path.insert(0, str(folder))
    chunk = importlib.import_module("parts").Chunk
    assert "facade" not in sys.modules
    assert [type(each) for each in objcomm.all_gather(chunk())] == [chunk] * 2


@ranks(2)
def test_classes_sent_by_value_keep_their_module_and_qualified_name() -> None:
    item = TypeVar("item")

    class Box(Generic[item]):
        class Lid:
            pass

    box, lid, variable = objcomm.broadcast((Box, Box.Lid, item) if objcomm.rank() == 0 else None)
    prefix = "test_classes_sent_by_value_keep_their_module_and_qualified_name.<locals>.Box"
    assert (box.__qualname__, lid.__qualname__) == (prefix, f"{prefix}.Lid")
    assert {each.__module__ for each in (box, lid, variable)} == {__name__}
