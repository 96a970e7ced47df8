"""Run torch's object collectives over Gloo in the same model.

The calls are those of ``torch/distributed/distributed_c10d.py`` (torch 2.13), and the algorithms
are those of Gloo's ``broadcast.cc``, ``gather.cc``, ``allgather.cc`` and ``barrier.cc``
(https://github.com/pytorch/gloo).
"""

from collections.abc import Callable, Sequence

from bench.model.link import Costs
from bench.model.world import Machine, Outcome, Receive, World

_SIZE_NBYTES = 8  # the length of an object, sent before it


class _Rank:
    """One rank's part.

    Attributes:
        rank: the rank.
        size: number of ranks.
        rounds: how often it waited.
    """

    def __init__(self, world: World, rank: int, costs: Costs) -> None:
        self.rank = rank
        self.size = world.size
        self.rounds = 0
        self._world = world
        self._costs = costs
        self._tag = 0

    def broadcast(self, nbytes: int) -> None:
        """Broadcast along a binomial tree from rank 0, to the nearest rank first."""
        self._tag += 1
        served = 1
        while served <= self.rank:
            served *= 2
        if self.rank:
            self._wait([self._recv(self.rank - served // 2)])
        while self.rank + served < self.size:
            self._send(self.rank + served, nbytes)
            served *= 2

    def gather(self, nbytes: int) -> None:
        """Send from every rank to rank 0."""
        self._tag += 1
        if self.rank:
            self._send(0, nbytes)
        else:
            self._wait([self._recv(peer) for peer in range(1, self.size)])

    def all_gather(self, nbytes: int) -> None:
        """Pass each rank's part around a ring, in two halves one after the other."""
        self._tag += 1
        halves = (nbytes // 2, nbytes - nbytes // 2)
        coming: list[Receive] = []
        for step in range(2 * (self.size - 1)):
            if len(coming) == len(halves):
                self._wait([coming.pop(0)])
            self._send((self.rank + 1) % self.size, halves[step % 2])
            coming.append(self._recv((self.rank - 1) % self.size))
        for each in coming:
            self._wait([each])

    def barrier(self) -> None:
        """Run a dissemination barrier: in each round a rank hears from twice as many ranks."""
        self._tag += 1
        distance = 1
        while distance < self.size:
            coming = self._recv((self.rank - distance) % self.size)
            self._send((self.rank + distance) % self.size, 0)
            self._wait([coming])
            distance *= 2

    def open(self, count: int) -> None:
        """Read objects from the received messages."""
        self._world.opened[self.rank] += count
        self._world.spend(self.rank, count * self._costs.open)

    def _send(self, peer: int, nbytes: int) -> None:
        self._world.spend(self.rank, self._costs.send)
        self._world.send(self.rank, peer, self._tag, nbytes, None)

    def _recv(self, peer: int) -> Receive:
        return self._world.recv(self.rank, peer, self._tag)

    def _wait(self, coming: Sequence[Receive]) -> None:
        for each in coming:
            self._world.wait(self.rank, each)
            self._world.spend(self.rank, self._costs.recv)
        self.rounds += bool(coming)


def _broadcast(rank: _Rank, nbytes: int) -> None:
    rank.broadcast(_SIZE_NBYTES)
    rank.broadcast(nbytes)
    rank.open(1 if rank.rank else 0)


def _gather(rank: _Rank, nbytes: int) -> None:
    rank.all_gather(_SIZE_NBYTES)
    rank.gather(nbytes)
    rank.open(0 if rank.rank else rank.size)


def _all_gather(rank: _Rank, nbytes: int) -> None:
    rank.all_gather(_SIZE_NBYTES)
    rank.all_gather(nbytes)
    rank.open(rank.size)


#: By objcomm's name for the operation.
TORCH_OPERATIONS: dict[str, Callable[[_Rank, int], None]] = {
    "barrier": lambda rank, _: rank.barrier(),
    "broadcast": _broadcast,
    "gather": _gather,
    "all_gather": _all_gather,
}


def run_torch(
    operation: str, hosts: Sequence[int], nbytes: int, machine: Machine, costs: Costs
) -> Outcome:
    """Do the same as ``operations.run``, with ``TORCH_OPERATIONS``."""
    world = World(hosts, machine)

    def on_rank(number: int) -> int:
        rank = _Rank(world, number, costs)
        world.spend(number, costs.call)
        TORCH_OPERATIONS[operation](rank, nbytes)
        return rank.rounds

    return world.outcome(max(world.run(on_rank)))
