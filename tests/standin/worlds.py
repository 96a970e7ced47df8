"""Ranks that join with the backend ``standin``, each on a separate device."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

import objcomm
from tests.group.helpers import assert_group_works
from tests.ranks import Body, ranks
from tests.standin import backend, device
from tests.waits import wait_until
from tests.workers import here


def on_devices(
    *world_sizes: int, backends: str = "cpu:gloo,standin:standin", **options: Any
) -> Callable[[Body], Body]:
    """Run the test's body on ranks that have joined, and check that their world still works.

    Device 1 is rank 0's current one.

    Args:
        world_sizes: the world sizes; the test is parametrized over them.
        backends: the ``backend`` argument of ``dist.init_process_group``.
        options: further options of `ranks`; a disposable world need not work afterwards.
    """
    may_break = bool(options.get("disposable") or options.get("expect_dead"))

    def decorate(body: Body) -> Body:
        @functools.wraps(body)
        def join_and_run(**arguments: object) -> None:
            _join(backends)
            body(**arguments)
            if not may_break:
                assert_group_works()

        return ranks(*world_sizes, joined=False, **options)(join_and_run)

    return decorate


def _join(backends: str) -> None:
    backend.set_up()
    place = here()
    device.set_device((place.rank + 1) % device.COUNT)
    dist.init_process_group(
        backends,
        store=place.store("rendezvous"),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=300),  # ends a stalled device path
    )


def joined_by(group: Any = None) -> backend.Backend:
    """Return the backend that connects the devices of a group's ranks."""
    group = dist.group.WORLD if group is None else group
    assert isinstance(group, backend.Group)
    return group.standin


def made() -> list[str]:
    """List the calls of this process so far, over any backend for the devices."""
    return backend.journal().made


def fetched(obj: Any) -> Any:
    """Copy the tensors in containers to the CPU, for inspection."""
    return pytree.tree_map_only(torch.Tensor, lambda each: each.detach().cpu(), obj)


def devices_in(obj: Any) -> list[torch.device]:
    """List the devices of the tensors in containers, in order."""
    return [each.device for each in pytree.tree_leaves(obj) if isinstance(each, torch.Tensor)]


def own_device() -> torch.device:
    """Return this rank's current device."""
    return torch.device(device.NAME, device.current_device())


def copies() -> list[str]:
    """List the copies to or from the CPU that were queued since the last call."""
    return [each.name for each in device.queued() if "cpu" in each.name]


def sent_nbytes() -> int:
    """Return the bytes this rank has sent over objcomm's own connections."""
    return sum(each.sent_nbytes for each in objcomm.stats().values())


@contextmanager
def over_the_devices_only() -> Iterator[None]:
    """Check that no tensor in the block goes through the CPU's memory."""
    device.queued()
    sent = sent_nbytes()
    yield
    assert copies() == []
    assert sent_nbytes() - sent < 10_000


def assert_aborted(numbers: Sequence[int], *, of: int) -> None:
    """Wait until exactly these of so many communicators are aborted; 0 is the oldest."""
    made = backend.journal().communicators
    wanted = [number in numbers for number in range(of)]
    wait_until(lambda: [each.is_aborted for each in made] == wanted, f"{numbers} aborted")


def assert_is_free(at: int, nbytes: int) -> None:
    """Wait until no more memory than so much is allocated on a device."""
    wait_until(lambda: device.memory_allocated(at) <= nbytes, "the memory is free")
