"""``objcomm.init`` finds the accelerator, its backend, and this rank's own device."""

import torch

import objcomm
from tests.group.helpers import assert_group_works
from tests.group.test_start import start_as
from tests.ranks import ranks
from tests.standin import backend, device
from tests.standin.worlds import made, own_device
from tests.workers import here


@ranks(2, 3, joined=False)
def test_init_joins_over_the_accelerators_backend() -> None:
    backend.set_up()
    rank, size = here().rank, here().world_size
    start_as(rank, size)
    start = objcomm.init()
    assert start.backend == "cpu:gloo,standin:standin"
    assert start.device == torch.device("standin", rank)
    assert device.current_device() == rank
    assert device.contexts() == set()
    got = objcomm.all_gather(torch.full((100_000,), rank).to("standin"))
    assert [int(each[-1].cpu()) for each in got] == list(range(size))
    assert {each.device for each in got} == {own_device()} == {start.device}
    assert made()
    assert_group_works()
    objcomm.shutdown()
