"""The compared libraries, all with the same methods.

Every method is a whole operation as a user would write it with that library; operations that the
library lacks are composed from others. Ranks are those of the world. mpi4py is imported only when
its peer is created, because the import starts MPI.
"""

import functools
import itertools
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterable
from multiprocessing import resource_tracker
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import objcomm
from bench.ring import CHUNKS, Ring, block_nbytes
from objcomm.compat import torch as dist_objects

Merge = Callable[[Any, Any], Any]

_BATCH = 25  # objects of a stream in a message

# Called by torch's object collectives; there is no public way to serialize without sending.
_to_tensor: Callable[..., tuple[torch.Tensor, torch.Tensor]] = distributed_c10d._object_to_tensor  # noqa: SLF001
_from_tensor: Callable[..., Any] = distributed_c10d._tensor_to_object  # noqa: SLF001


class Peer(Protocol):
    """The operations that a case may use; see the module's docstring."""

    rank: int
    world: int
    sends_objects: bool  # False if only the same number of raw bytes is sent

    def prepare(self, mine: Any) -> Any:
        """Convert this rank's payload for the peer, once and outside the measurement."""

    def broadcast(self, obj: Any) -> Any:
        """Return rank 0's object on every rank."""

    def gather(self, obj: Any) -> Any:
        """Return every rank's object on rank 0."""

    def all_gather(self, obj: Any) -> Any:
        """Return every rank's object on every rank."""

    def scatter(self, obj: Any) -> Any:
        """Return one of rank 0's objects on each rank; here all are the same object."""

    def all_reduce(self, obj: Any, merge: Merge) -> Any:
        """Return all objects merged in rank order, on every rank."""

    def all_to_all(self, obj: Any) -> Any:
        """Return one object from every rank on each rank; here all of a rank's are the same."""

    def scan(self, obj: Any, merge: Merge) -> Any:
        """Return the objects of all ranks up to this one, merged in rank order."""

    def reduce_scatter(self, obj: Any, merge: Merge) -> Any:
        """Return every rank's object for this rank, merged in rank order."""

    def gather_scalar(self, value: Any) -> Any:
        """Return one number per rank on rank 0."""

    def reduce_and_broadcast(self, produce: Callable[[], Any], combine: Callable[..., Any]) -> Any:
        """Apply ``combine`` once to the results of ``produce``, and return that on every rank."""

    def run_on_main(self, produce: Callable[[], Any]) -> Any:
        """Return the result of ``produce`` on rank 0, on every rank."""

    def begin_broadcast(self, obj: Any) -> Callable[[], object]:
        """Start to broadcast rank 0's object; return a function that waits for it."""

    def all_gather_in_flight(self, obj: Any) -> Any:
        """Start ``all_gather`` asynchronously, and wait for it."""

    def there_and_back(self, obj: Any) -> Any:
        """Send rank 0's object to rank 1, which sends it back, as point-to-point messages."""

    def requests(self, objs: Any) -> Any:
        """Exchange two ranks' objects, one message each: start receives, then sends, then wait.

        A peer without asynchronous messages sends and receives them one by one.
        """

    def all_reduce_slowly(self, obj: Any, merge: Merge) -> Any:
        """Do ``all_reduce`` with an operator that costs more than a message."""

    def sum_tensors(self, tensors: Any) -> Any:
        """Add up a dict of tensors over the ranks."""

    def average_gradients(self, parameters: Any) -> Any:
        """Average the gradients of a list of parameters in place."""

    def broadcast_file(self, path: Path, to: Path) -> None:
        """Write a copy of rank 0's file on every rank, and wait for the disk."""

    def stream(self, obj: Any) -> Callable[[], Any]:
        """Return a function that gives the next object of an endless stream from rank 0.

        All are the same object here. Rank 0 may be ten objects ahead of each other rank.
        """

    def barrier(self) -> None:
        """Return when every rank has called this."""

    def first_barrier(self) -> None:
        """Do ``barrier``, including the connections that it needs."""

    def round_trip(self, obj: Any) -> Any:
        """Serialize and deserialize, in one process."""

    def in_library(self, call: Callable[[], object]) -> object:
        """Run a library's own call with this peer's object collectives."""


class _Objcomm:
    """This package."""

    sends_objects = True

    def __init__(self, codec: str | None = None) -> None:
        self.rank, self.world, self._codec = dist.get_rank(), dist.get_world_size(), codec

    def prepare(self, mine: Any) -> Any:
        return mine

    def broadcast(self, obj: Any) -> Any:
        return objcomm.broadcast(obj, codec=self._codec)

    def gather(self, obj: Any) -> Any:
        return objcomm.gather(obj, codec=self._codec)

    def all_gather(self, obj: Any) -> Any:
        return objcomm.all_gather(obj, codec=self._codec)

    def scatter(self, obj: Any) -> Any:
        return objcomm.scatter([obj] * self.world if self.rank == 0 else None, codec=self._codec)

    def all_reduce(self, obj: Any, merge: Merge) -> Any:
        return objcomm.all_reduce(obj, merge, codec=self._codec)

    def begin_broadcast(self, obj: Any) -> Callable[[], object]:
        work: objcomm.Work[Any] = objcomm.broadcast(obj, codec=self._codec, async_op=True)
        return work.wait

    def all_gather_in_flight(self, obj: Any) -> Any:
        return objcomm.all_gather(obj, codec=self._codec, async_op=True).wait()

    def there_and_back(self, obj: Any) -> Any:
        if self.rank == 0:
            objcomm.send(obj, 1, codec=self._codec)
            return objcomm.recv(1)
        got = objcomm.recv(0)
        objcomm.send(got, 0, codec=self._codec)
        return got

    def requests(self, objs: Any) -> Any:
        other = 1 - self.rank
        coming = [objcomm.irecv(other) for _ in objs]
        going = [objcomm.isend(obj, other, codec=self._codec) for obj in objs]
        objcomm.wait_all(going)
        return objcomm.wait_all(coming)

    def all_reduce_slowly(self, obj: Any, merge: Merge) -> Any:
        return objcomm.all_reduce(obj, objcomm.Op(merge, slow=True), codec=self._codec)

    def all_to_all(self, obj: Any) -> Any:
        return objcomm.all_to_all([obj] * self.world, codec=self._codec)

    def scan(self, obj: Any, merge: Merge) -> Any:
        return objcomm.scan(obj, merge, codec=self._codec)

    def reduce_scatter(self, obj: Any, merge: Merge) -> Any:
        return objcomm.reduce_scatter([obj] * self.world, merge, codec=self._codec)

    def gather_scalar(self, value: Any) -> Any:
        return objcomm.gather_scalar(value)

    def reduce_and_broadcast(self, produce: Callable[[], Any], combine: Callable[..., Any]) -> Any:
        return objcomm.reduce_and_broadcast(produce, combine, codec=self._codec)

    def run_on_main(self, produce: Callable[[], Any]) -> Any:
        return objcomm.run_on_main(produce)

    def sum_tensors(self, tensors: Any) -> Any:
        return objcomm.all_reduce(tensors, codec=self._codec)

    def average_gradients(self, parameters: Any) -> Any:
        objcomm.models.sync_gradients(parameters)
        return [each.grad for each in parameters]

    def broadcast_file(self, path: Path, to: Path) -> None:
        objcomm.broadcast_file(path, to)

    def stream(self, obj: Any) -> Callable[[], Any]:
        return self._streamed(obj, depth=CHUNKS)

    def _streamed(self, obj: Any, depth: int, batch: int = 1) -> Callable[[], Any]:
        objs = itertools.repeat(obj) if self.rank == 0 else None
        stream: objcomm.Stream[Any]
        stream = objcomm.stream(objs, depth=depth, batch=batch, codec=self._codec)
        return stream.__next__

    def barrier(self) -> None:
        objcomm.barrier()

    def first_barrier(self) -> None:
        self.barrier()  # the first call connects

    def round_trip(self, obj: Any) -> Any:
        return objcomm.from_tensor(objcomm.to_tensor(obj, codec=self._codec))

    def in_library(self, call: Callable[[], object]) -> object:
        raise NotImplementedError("a library calls by torch's names")


class _Guarded(_Objcomm):
    """This package with options of ``objcomm.configure`` set during each call."""

    def __init__(self, **options: Any) -> None:
        super().__init__(options.get("codec"))
        self._options = options

    def broadcast(self, obj: Any) -> Any:
        with objcomm.configure(**self._options):
            return super().broadcast(obj)

    def all_gather(self, obj: Any) -> Any:
        with objcomm.configure(**self._options):
            return super().all_gather(obj)

    def round_trip(self, obj: Any) -> Any:
        with objcomm.configure(**self._options):
            return super().round_trip(obj)


class _InTurn(_Objcomm):
    """This package with synchronous calls only, one after another."""

    def all_gather_in_flight(self, obj: Any) -> Any:
        return self.all_gather(obj)

    def requests(self, objs: Any) -> Any:
        return [self.there_and_back(obj) for obj in objs]

    def all_reduce_slowly(self, obj: Any, merge: Merge) -> Any:
        return self.all_reduce(obj, merge)


class _Batched(_Objcomm):
    """This package with several objects of a stream in each message."""

    def stream(self, obj: Any) -> Callable[[], Any]:
        return self._streamed(obj, depth=CHUNKS * _BATCH, batch=_BATCH)


class _Idle(_Objcomm):
    """This package while it does nothing."""

    sends_objects = False

    def begin_broadcast(self, obj: Any) -> Callable[[], object]:
        return lambda: obj


class _Gathered(_Objcomm):
    """This package with ``all_gather`` in place of ``scan``, as the unit for ``scan``."""

    sends_objects = False  # nothing is merged

    def scan(self, obj: Any, merge: Merge) -> Any:
        del merge
        return self.all_gather(obj)


class _Joined(_Objcomm):
    """This package with all gradients in one tensor."""

    sends_objects = False

    def prepare(self, mine: Any) -> Any:
        joined = torch.nn.Parameter(torch.zeros(sum(each.numel() for each in mine)))
        joined.grad = _joined([each.grad for each in mine])
        return [joined]


class _Torch:
    """The object collectives of ``torch.distributed``, or of a module with the same functions."""

    sends_objects = True

    def __init__(self, api: Any = dist) -> None:
        self.rank, self.world, self._api = dist.get_rank(), dist.get_world_size(), api

    def prepare(self, mine: Any) -> Any:
        return mine

    def broadcast(self, obj: Any) -> Any:
        box = [obj if self.rank == 0 else None]
        self._api.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, obj: Any) -> Any:
        boxes = [None] * self.world if self.rank == 0 else None
        self._api.gather_object(obj, boxes, dst=0)
        return boxes

    def all_gather(self, obj: Any) -> Any:
        boxes = [None] * self.world
        self._api.all_gather_object(boxes, obj)
        return boxes

    def scatter(self, obj: Any) -> Any:
        box = [None]
        self._api.scatter_object_list(box, [obj] * self.world if self.rank == 0 else None, src=0)
        return box[0]

    def all_reduce(self, obj: Any, merge: Merge) -> Any:
        return functools.reduce(merge, self.all_gather(obj))

    def begin_broadcast(self, obj: Any) -> Callable[[], object]:
        raise NotImplementedError("torch has no asynchronous collective of objects")

    def all_gather_in_flight(self, obj: Any) -> Any:
        return self.all_gather(obj)

    def there_and_back(self, obj: Any) -> Any:
        box = [obj]
        if self.rank == 0:
            self._api.send_object_list(box, dst=1)
            self._api.recv_object_list(box, src=1)
        else:
            self._api.recv_object_list(box, src=0)
            self._api.send_object_list(box, dst=0)
        return box[0]

    def requests(self, objs: Any) -> Any:
        return [self.there_and_back(obj) for obj in objs]

    def all_reduce_slowly(self, obj: Any, merge: Merge) -> Any:
        return self.all_reduce(obj, merge)

    def all_to_all(self, obj: Any) -> Any:
        objs = [obj] * self.world
        arrived: list[Any] = []
        for source in range(self.world):
            box = [None]
            self._api.scatter_object_list(box, objs if self.rank == source else None, src=source)
            arrived.append(box[0])
        return arrived

    def scan(self, obj: Any, merge: Merge) -> Any:
        return functools.reduce(merge, self.all_gather(obj)[: self.rank + 1])

    def reduce_scatter(self, obj: Any, merge: Merge) -> Any:
        return functools.reduce(merge, self.all_to_all(obj))

    def gather_scalar(self, value: Any) -> Any:
        return self.gather(value)

    def reduce_and_broadcast(self, produce: Callable[[], Any], combine: Callable[..., Any]) -> Any:
        parts = self.gather(produce())
        return self.broadcast(combine(parts) if self.rank == 0 else None)

    def run_on_main(self, produce: Callable[[], Any]) -> Any:
        # As in SpeechBrain: a broadcast of the result, then a barrier.
        result = self.broadcast(produce() if self.rank == 0 else None)
        dist.barrier()
        return result

    def sum_tensors(self, tensors: Any) -> Any:
        flat = _joined(tensors.values())
        dist.all_reduce(flat)
        sizes = [each.numel() for each in tensors.values()]
        return dict(zip(tensors, flat.split(sizes), strict=True))

    def average_gradients(self, parameters: Any) -> Any:
        # As in flashy's sync_gradients: one collective for each gradient.
        works = [dist.all_reduce(each.grad, async_op=True) for each in parameters]
        for each, work in zip(parameters, works, strict=True):
            work.wait()
            each.grad.div_(self.world)
        return [each.grad for each in parameters]

    def broadcast_file(self, path: Path, to: Path) -> None:
        _write(to, self.broadcast(path.read_bytes() if self.rank == 0 else None))

    def barrier(self) -> None:
        dist.barrier()

    def stream(self, obj: Any) -> Callable[[], Any]:
        return functools.partial(self.broadcast, obj)

    def first_barrier(self) -> None:
        dist.barrier(group=dist.new_group())

    def round_trip(self, obj: Any) -> Any:
        cpu = torch.device("cpu")
        return _from_tensor(*_to_tensor(obj, cpu, dist.group.WORLD), dist.group.WORLD)

    def in_library(self, call: Callable[[], object]) -> object:
        return call()


class _Patched(_Torch):
    """The functions of ``objcomm.compat.torch``, which replace torch's while a library runs."""

    def __init__(self) -> None:
        super().__init__(dist_objects)

    def in_library(self, call: Callable[[], object]) -> object:
        with dist_objects.patch():
            return call()


class _Raw:
    """The tensor collectives of ``torch.distributed``, moving as many bytes as the object has.

    Shapes must be the same on all ranks and known beforehand, so uneven payloads are padded to the
    largest. Receives into memory allocated in the call, or with ``warm`` always into the same.
    """

    sends_objects = False

    def __init__(self, *, warm: bool = False) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._memory = functools.cache(torch.empty_like) if warm else torch.empty_like

    def prepare(self, mine: Any) -> torch.Tensor:
        flat = _flat_bytes(mine)
        nbytes = torch.tensor(flat.numel())
        dist.all_reduce(nbytes, op=dist.ReduceOp.MAX)
        missing = int(nbytes) - flat.numel()
        return torch.nn.functional.pad(flat, (0, missing)) if missing else flat

    def broadcast(self, obj: torch.Tensor) -> torch.Tensor:
        box = obj if self.rank == 0 else self._memory(obj)
        dist.broadcast(box, src=0)
        return box

    def gather(self, obj: torch.Tensor) -> list[torch.Tensor] | None:
        boxes = [torch.empty_like(obj) for _ in range(self.world)] if self.rank == 0 else None
        dist.gather(obj, boxes, dst=0)
        return boxes

    def all_gather(self, obj: torch.Tensor) -> list[torch.Tensor]:
        boxes = [torch.empty_like(obj) for _ in range(self.world)]
        dist.all_gather(boxes, obj)
        return boxes

    def scatter(self, obj: torch.Tensor) -> torch.Tensor:
        box = torch.empty_like(obj)
        dist.scatter(box, [obj] * self.world if self.rank == 0 else None, src=0)
        return box

    def all_reduce(self, obj: torch.Tensor, merge: Merge) -> torch.Tensor:
        del merge  # a tensor collective can only sum
        summed = obj.clone()
        dist.all_reduce(summed)
        return summed

    def begin_broadcast(self, obj: torch.Tensor) -> Callable[[], object]:
        box = obj if self.rank == 0 else self._memory(obj)
        work = dist.broadcast(box, src=0, async_op=True)

        def wait() -> torch.Tensor:
            work.wait()
            return box

        return wait

    def all_gather_in_flight(self, obj: torch.Tensor) -> list[torch.Tensor]:
        boxes = [torch.empty_like(obj) for _ in range(self.world)]
        work = dist.all_gather(boxes, obj, async_op=True)
        work.wait()
        return boxes

    def there_and_back(self, obj: torch.Tensor) -> torch.Tensor:
        box = self._memory(obj)
        if self.rank == 0:
            dist.send(obj, 1)
            dist.recv(box, 1)
        else:
            dist.recv(box, 0)
            dist.send(box, 0)
        return box

    def requests(self, objs: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("its objects are one tensor")

    def all_reduce_slowly(self, obj: torch.Tensor, merge: Merge) -> torch.Tensor:
        return self.all_reduce(obj, merge)

    def all_to_all(self, obj: torch.Tensor) -> torch.Tensor:
        box = torch.empty((self.world, *obj.shape), dtype=obj.dtype)
        dist.all_to_all_single(box, obj.expand_as(box).contiguous())
        return box

    def scan(self, obj: torch.Tensor, merge: Merge) -> list[torch.Tensor]:
        del merge
        return self.all_gather(obj)

    def reduce_scatter(self, obj: torch.Tensor, merge: Merge) -> torch.Tensor:
        del merge
        box = torch.empty_like(obj)
        dist.reduce_scatter(box, [obj] * self.world)
        return box

    def gather_scalar(self, value: torch.Tensor) -> list[torch.Tensor] | None:
        return self.gather(value)

    def reduce_and_broadcast(
        self, produce: Callable[[], torch.Tensor], combine: Callable[..., Any]
    ) -> torch.Tensor:
        del combine
        return self.all_reduce(produce(), max)

    def run_on_main(self, produce: Callable[[], torch.Tensor]) -> torch.Tensor:
        return self.broadcast(produce())

    def sum_tensors(self, tensors: Any) -> Any:
        dist.all_reduce(tensors)
        return tensors

    def average_gradients(self, parameters: Any) -> Any:
        return self.sum_tensors(parameters).div_(self.world)

    def broadcast_file(self, path: Path, to: Path) -> None:
        # Each rank knows the size.
        of = (
            np.fromfile(path, np.uint8)
            if self.rank == 0
            else np.empty(path.stat().st_size, np.uint8)
        )
        box = torch.from_numpy(of)
        dist.broadcast(box, src=0)
        _write(to, of)

    def barrier(self) -> None:
        dist.barrier()

    def stream(self, obj: Any) -> Callable[[], Any]:
        return functools.partial(self.broadcast, obj)

    def first_barrier(self) -> None:
        raise NotImplementedError("its barrier is torch's")

    def round_trip(self, obj: torch.Tensor) -> torch.Tensor:
        return obj.clone()

    def in_library(self, call: Callable[[], object]) -> object:
        raise NotImplementedError("a library sends objects")


class _OneBuffer(_Raw):
    """The tensor collectives of ``torch.distributed``, in place on one tensor with all numbers."""

    def prepare(self, mine: Any) -> torch.Tensor:
        return _joined(mine.values() if isinstance(mine, dict) else [each.grad for each in mine])


class _Mpi4py:
    """The lower-case methods of an mpi4py communicator."""

    sends_objects = True

    def __init__(self, *, out_of_band: bool = False) -> None:
        from mpi4py import MPI  # noqa: PLC0415  # starts MPI
        from mpi4py.util import pkl5  # noqa: PLC0415

        self._comm = pkl5.Intracomm(MPI.COMM_WORLD) if out_of_band else MPI.COMM_WORLD
        self._pickle = MPI.pickle
        self.rank, self.world = self._comm.rank, self._comm.size

    def prepare(self, mine: Any) -> Any:
        return mine

    def broadcast(self, obj: Any) -> Any:
        return self._comm.bcast(obj if self.rank == 0 else None, root=0)

    def gather(self, obj: Any) -> Any:
        return self._comm.gather(obj, root=0)

    def all_gather(self, obj: Any) -> Any:
        return self._comm.allgather(obj)

    def scatter(self, obj: Any) -> Any:
        return self._comm.scatter([obj] * self.world if self.rank == 0 else None, root=0)

    def all_reduce(self, obj: Any, merge: Merge) -> Any:
        return self._comm.allreduce(obj, op=merge)

    def begin_broadcast(self, obj: Any) -> Callable[[], object]:
        raise NotImplementedError("mpi4py has no asynchronous collective of objects")

    def all_gather_in_flight(self, obj: Any) -> Any:
        return self.all_gather(obj)

    def there_and_back(self, obj: Any) -> Any:
        if self.rank == 0:
            self._comm.send(obj, dest=1)
            return self._comm.recv(source=1)
        got = self._comm.recv(source=0)
        self._comm.send(got, dest=0)
        return got

    def requests(self, objs: Any) -> Any:
        other = 1 - self.rank
        coming = [self._comm.irecv(source=other) for _ in objs]
        going = [self._comm.isend(obj, dest=other) for obj in objs]
        for request in going:
            request.wait()
        return [request.wait() for request in coming]

    def all_reduce_slowly(self, obj: Any, merge: Merge) -> Any:
        return self.all_reduce(obj, merge)

    def all_to_all(self, obj: Any) -> Any:
        return self._comm.alltoall([obj] * self.world)

    def scan(self, obj: Any, merge: Merge) -> Any:
        return self._comm.scan(obj, op=merge)

    def reduce_scatter(self, obj: Any, merge: Merge) -> Any:
        return functools.reduce(merge, self.all_to_all(obj))

    def gather_scalar(self, value: Any) -> Any:
        return self._comm.gather(value, root=0)

    def reduce_and_broadcast(self, produce: Callable[[], Any], combine: Callable[..., Any]) -> Any:
        parts = self._comm.gather(produce(), root=0)
        return self._comm.bcast(combine(parts) if parts is not None else None, root=0)

    def run_on_main(self, produce: Callable[[], Any]) -> Any:
        return self.broadcast(produce() if self.rank == 0 else None)

    def sum_tensors(self, tensors: Any) -> Any:
        return self._comm.allreduce(
            tensors, op=lambda left, right: {key: left[key] + right[key] for key in left}
        )

    def average_gradients(self, parameters: Any) -> Any:
        raise NotImplementedError("mpi4py knows no gradients")

    def broadcast_file(self, path: Path, to: Path) -> None:
        _write(to, self.broadcast(path.read_bytes() if self.rank == 0 else None))

    def barrier(self) -> None:
        self._comm.Barrier()

    def stream(self, obj: Any) -> Callable[[], Any]:
        return functools.partial(self.broadcast, obj)

    def first_barrier(self) -> None:
        raise NotImplementedError("MPI connects when it starts")

    def round_trip(self, obj: Any) -> Any:
        return self._pickle.loads(self._pickle.dumps(obj))

    def in_library(self, call: Callable[[], object]) -> object:
        raise NotImplementedError("a library calls by torch's names")


class _Ring:
    """A ring in shared memory, written by rank 0; it supports only broadcasts."""

    sends_objects = True

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        readers = self.world - 1
        if self.rank == 0:
            block = SharedMemory(create=True, size=block_nbytes(readers))
            dist.broadcast_object_list([block.name], src=0)
        else:
            box = [""]
            dist.broadcast_object_list(box, src=0)
            block = SharedMemory(box[0])
            # Otherwise Python would remove the block a second time when this process ends.
            resource_tracker.unregister(f"/{block.name}", "shared_memory")
        dist.barrier()
        if self.rank == 0:
            block.unlink()  # stays usable in processes that have it open, until they end
        self._ring = Ring(block, readers)

    def prepare(self, mine: Any) -> Any:
        return mine

    def broadcast(self, obj: Any) -> Any:
        if self.rank == 0:
            self._ring.write(obj)
            return obj
        return self._ring.read(self.rank - 1)

    def stream(self, obj: Any) -> Callable[[], Any]:
        return functools.partial(self.broadcast, obj)


class _Queues:
    """A ``multiprocessing.Queue`` for each other rank, into which rank 0 puts each object."""

    sends_objects = True

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        box: list[Any] = [None]
        if self.rank == 0:
            spawning = multiprocessing.get_context("spawn")  # its locks can be opened by name
            self._queues = [spawning.Queue(CHUNKS) for _ in range(1, self.world)]
            set_spawning_popen(cast("Any", _Handover()))
            try:
                box = [ForkingPickler.dumps(self._queues).tobytes()]
            finally:
                set_spawning_popen(None)
        dist.broadcast_object_list(box, src=0)
        if self.rank:
            self._queues = pickle.loads(box[0])  # noqa: S301  # the benchmark's own
        dist.barrier()

    def prepare(self, mine: Any) -> Any:
        return mine

    def stream(self, obj: Any) -> Callable[[], Any]:
        def put() -> Any:
            for each in self._queues:
                each.put(obj)
            return obj

        return self._queues[self.rank - 1].get if self.rank else put


class _Handover:
    """Lets queues be pickled for processes that ``multiprocessing`` has not started."""

    def duplicate_for_child(self, fd: int) -> int:
        return fd

    def DupFd(self, fd: int) -> "_Opened":  # noqa: N802  # called by multiprocessing
        return _Opened(os.getpid(), fd)


class _Opened(NamedTuple):
    """A pipe of another process."""

    process: int
    fd: int

    def detach(self) -> int:
        """Open it in this process."""
        return os.open(f"/proc/{self.process}/fd/{self.fd}", os.O_RDWR)


#: Functions that create the peers, by the names that cases and reports use.
PEERS: dict[str, Callable[[], Peer]] = {
    "objcomm": _Objcomm,
    "objcomm msgpack": lambda: _Objcomm("msgpack"),
    "objcomm key": lambda: _Guarded(key="a benchmark guards no secret"),
    "objcomm allow": lambda: _Guarded(allow=()),
    "objcomm all_gather": _Gathered,
    "objcomm check": lambda: _Guarded(check=True),
    "objcomm in turn": _InTurn,
    "objcomm over Gloo": lambda: _Guarded(transport="gloo"),  # in separate processes
    "objcomm batched": _Batched,
    "objcomm idle": _Idle,
    "objcomm joined": _Joined,
    "torch": _Torch,
    "objcomm.compat": _Patched,
    "raw": _Raw,
    "raw warm": lambda: _Raw(warm=True),
    "raw in place": _OneBuffer,
    "mpi4py": _Mpi4py,
    "mpi4py pkl5": lambda: _Mpi4py(out_of_band=True),
    "ring": lambda: cast("Peer", _Ring()),  # for cases that only broadcast
    "queue": lambda: cast("Peer", _Queues()),  # for cases that only stream
}


def needs_mpi(peer: str) -> bool:
    """Whether a peer can be created only in processes that ``mpiexec`` started."""
    return peer.startswith("mpi4py")


def _write(path: Path, content: Any) -> None:
    with path.open("wb") as file:
        file.write(content)
        os.fsync(file)


def _joined(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.view(-1) for each in tensors])


def _flat_bytes(obj: Any) -> torch.Tensor:
    # The bytes that a program with tensors would send: the numbers, or else the pickle.
    if isinstance(obj, dict) and set(obj) == {"w"}:
        return _flat_bytes(obj["w"])
    if isinstance(obj, torch.Tensor):
        return obj.contiguous().view(torch.uint8)
    if isinstance(obj, np.ndarray):
        return torch.from_numpy(obj).view(torch.uint8)
    if isinstance(obj, bytes):
        return torch.frombuffer(bytearray(obj), dtype=torch.uint8)
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
