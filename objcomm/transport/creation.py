"""Makes a process group of some ranks, which no other rank hears of.

``dist.new_group`` asks every rank of the world to call it, in one order. With
``use_local_synchronization=True`` only members need to, but then torch names the group by its ranks
and by how many groups this process has: members with different pasts wait for each other under
different names, for as long as the limit. Here the members have agreed on a name before.
"""

from __future__ import annotations  # torch may be built without distributed

import contextlib
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from objcomm.config import settings
from objcomm.transport.stores import Clients, store_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

# All members are here, and only have to connect: one that dies now must not hold the others for
# as long as a call.
CONNECT_MAX = timedelta(seconds=60)


def create(
    parent: Any,
    name: str,
    ranks: Sequence[int],
    *,
    limit: timedelta,
    timeout: timedelta,
    purpose: str,
    clients: Clients,
) -> Any:
    """Make a process group with the backend of ``parent``; every one of ``ranks`` must call this.

    It may block in C++ up to the limit.

    Args:
        parent: where its members come from.
        name: the same on all members, and no other group's.
        ranks: global ranks, in the order of the new group.
        limit: how long to wait for the connections.
        timeout: the new group's own time limit.
        purpose: what torch's log says that it is for.
        clients: connections to the world's store, for groups of the user's.

    Raises:
        RuntimeError: a connection failed.
    """
    from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415  # absent in some builds

    world: Any = dist.GroupMember.WORLD
    backend = dist.get_backend(parent)
    store = clients.take(store_of(world), settings().lost_after)
    with _binding.hidden(world) as device:
        group, _ = c10d._new_process_group_helper(  # noqa: SLF001  # there is no public way, see above
            len(ranks),
            ranks.index(world.rank()),
            list(ranks),
            backend,
            store,
            name,  # type: ignore[arg-type]  # a NewType of str
            timeout=min(limit, CONNECT_MAX),
            group_desc=f"objcomm.{purpose}",
        )
    if backend == dist.Backend.GLOO:  # another may meet later, and wait in the store for that
        clients.give_back(store)
    order = {rank: place for place, rank in enumerate(ranks)}
    c10d._world.pg_group_ranks[group] = order  # noqa: SLF001  # as new_group does
    group.bound_device_id = device
    for each in group._device_types:  # noqa: SLF001  # torch has no public way to ask
        group._get_backend(each)._set_default_timeout(timeout)  # noqa: SLF001  # nor to set it
    return group


def is_alive(group: Any) -> bool:
    """Whether torch knows a process group: it was not destroyed."""
    try:
        dist.get_backend(group)
    except ValueError:
        return False
    return True


class _Binding:
    """Hides from torch that the world is bound to a device, while any thread makes a group.

    Torch would split the world's NCCL communicator for the new group, which every rank of the
    world would have to join. A communicator of the group's own is made at its first use instead.
    """

    def __init__(self) -> None:
        # Not held while a thread connects: two that wait for different ranks must not wait for
        # each other.
        self._lock = threading.Lock()
        self._hiding = 0
        self._device: torch.device | None = None

    @contextlib.contextmanager
    def hidden(self, world: Any) -> Iterator[torch.device | None]:
        """Hide it in this block, which gets it."""
        with self._lock:
            if not self._hiding:
                self._device = world.bound_device_id
                world.bound_device_id = None
            self._hiding += 1
            device = self._device
        try:
            yield device
        finally:
            with self._lock:
                self._hiding -= 1
                if not self._hiding:
                    world.bound_device_id = self._device


_binding = _Binding()
