"""The model of many ranks: its clocks, and that it sends what real ranks send."""

import sys

import pytest

from bench.model.fit import fitted
from bench.model.link import Costs
from bench.model.meeting import CountingStore, meet_in_model
from bench.model.operations import OPERATIONS, run
from bench.model.torch_operations import TORCH_OPERATIONS, run_torch
from bench.model.world import DeadlockError, Machine, World
from tests.doctor.job import by_command

_MACHINE = Machine(cores=0, near_seconds=1.0, near_rate=10.0, far_seconds=3.0, far_rate=5.0)
_FREE = Costs(0.0, 0.0, 0.0, 0.0)
_COSTS = Costs(1e-4, 2e-5, 3e-5, 1e-5)


def _hosts(size: int, each: int) -> list[int]:
    return [rank // each for rank in range(size)]


@pytest.mark.parametrize(
    ("ranks", "per_host"), [(8, 8), pytest.param(12, 4, marks=pytest.mark.long)]
)
def test_real_ranks_send_what_the_model_sends(ranks: int, per_host: int) -> None:
    # In a separate process, because it forks the ranks.
    command = [sys.executable, "-m", "bench.model", "check"]
    done = by_command([*command, "--ranks", str(ranks), "--per-host", str(per_host)])
    assert done.status == 0, done.err
    count = len(OPERATIONS)
    assert f"{count} of {count} send what the model sends" in done.out


def _arrivals(world: World, sends: dict[int, list[tuple[int, int]]]) -> list[float]:
    """Return when each rank has received all that others send to it, given each rank's messages."""

    def on_rank(rank: int) -> float:
        for peer, nbytes in sends.get(rank, []):
            world.send(rank, peer, 0, nbytes, None)
        for source, several in sends.items():
            for peer, _ in several:
                if peer == rank:
                    world.wait(rank, world.recv(rank, source, 0))
        return world.clocks[rank]

    return world.run(on_rank)


def test_a_message_takes_its_way_and_its_bytes() -> None:
    assert _arrivals(World([0, 0, 1], _MACHINE), {0: [(1, 20)]})[1] == 1.0 + 20 / 10
    assert _arrivals(World([0, 0, 1], _MACHINE), {0: [(2, 20)]})[2] == 3.0 + 20 / 5


def test_the_ranks_of_a_host_share_its_network_card() -> None:
    leaving = World([0, 0, 1, 2], _MACHINE)
    assert _arrivals(leaving, {0: [(2, 20)], 1: [(3, 20)]})[2:] == [7.0, 11.0]
    arriving = World([0, 1, 2, 2], _MACHINE)
    assert _arrivals(arriving, {0: [(2, 20)], 1: [(3, 20)]})[2:] == [7.0, 11.0]
    assert (arriving.cards[2].received, arriving.cards[2].received_nbytes) == (2, 40)


def test_the_earlier_sender_gets_the_card_whichever_rank_runs_first() -> None:
    world = World([0, 0, 1], _MACHINE)

    def on_rank(rank: int) -> float:
        if rank < 2:
            world.spend(rank, 10.0 * (1 - rank))  # rank 0 is late
            world.send(rank, 2, 0, 50, None)
            return 0.0
        early = world.recv(2, 1, 0)
        world.wait(2, early)
        return world.clocks[2]

    assert world.run(on_rank)[2] == 3.0 + 50 / 5


def test_ranks_wait_for_a_processor_where_a_host_has_fewer() -> None:
    world = World([0, 0, 0], Machine(2, 1.0, 10.0, 3.0, 5.0))

    def on_rank(rank: int) -> float:
        world.spend(rank, 4.0)
        return world.clocks[rank]

    assert sorted(world.run(on_rank)) == [4.0, 4.0, 8.0]


def test_a_deadlock_in_the_model_ends_the_run() -> None:
    world = World([0, 0], _MACHINE)
    with pytest.raises(DeadlockError, match="2 ranks wait"):
        world.run(lambda rank: world.wait(rank, world.recv(rank, 1 - rank, 0)))


@pytest.mark.parametrize("does_ask", [False, True], ids=["wait", "ask again and again"])
def test_the_error_of_a_rank_is_raised_whatever_others_do(*, does_ask: bool) -> None:
    world = World([0, 0], _MACHINE)

    def on_rank(rank: int) -> None:
        if rank == 1:
            raise ValueError("of rank 1")
        while does_ask:
            world.ask(rank, 1.0)
        world.wait(rank, world.recv(rank, 1, 0))

    with pytest.raises(ValueError, match="of rank 1"):
        world.run(on_rank)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_model_gives_the_same_result_each_time(operation: str) -> None:
    hosts = _hosts(24, 4)
    first, second = (run(operation, hosts, 200, _MACHINE, _COSTS) for _ in range(2))
    assert first == second
    assert first.seconds > _COSTS.call


@pytest.mark.parametrize("operation", ["barrier", "broadcast", "gather", "scatter"])
def test_of_many_ranks_none_serves_more_than_sixteen(operation: str) -> None:
    found = run(operation, _hosts(512, 8), 200, _MACHINE, _COSTS)
    assert found.connections <= 16 + 1  # plus its parent


def test_torchs_ring_has_two_halves_of_each_part_for_each_rank() -> None:
    found = run_torch("all_gather", _hosts(8, 4), 100, _MACHINE, _COSTS)
    assert found.messages == 2 * 2 * 2 * 7  # lengths and parts, halves, sent and received
    assert sum(nbytes for _, nbytes in found.sends[0]) == 7 * (8 + 100)


@pytest.mark.parametrize(("size", "rounds"), [(2, 1), (8, 3), (9, 4)])
def test_torchs_barrier_has_as_many_rounds_as_the_size_has_bits(size: int, rounds: int) -> None:
    assert run_torch("barrier", [0] * size, 0, _MACHINE, _FREE).rounds == rounds


@pytest.mark.parametrize("size", [2, 7, 8])
def test_torchs_broadcast_reaches_each_rank_once(size: int) -> None:
    found = run_torch("broadcast", [0] * size, 100, _MACHINE, _FREE)
    reached = [peer for each in found.sends for peer, nbytes in each if nbytes == 100]
    assert sorted(reached) == list(range(1, size))


def test_the_fit_recovers_the_costs() -> None:
    taken = []
    for operation in TORCH_OPERATIONS:
        for size in (8, 16):
            found = run_torch(operation, [0] * size, 100, _MACHINE, _FREE)
            busy = 1e-4 + 2e-5 * found.mean_messages + 3e-6 * found.mean_opened
            taken.append((busy, found))
    fit = fitted(taken)
    costs = fit.costs
    assert (fit.half, fit.worst) == pytest.approx((1.0, 1.0))
    assert (costs.call, costs.send, costs.open) == pytest.approx((1e-4, 2e-5, 3e-6))
    assert costs.send == costs.recv


def test_ranks_that_meet_in_the_model_leave_nothing_and_ask_one_after_another() -> None:
    world = World(_hosts(6, 2), Machine(0, 0.0, 1.0, 1e-3, 1.0))
    assert meet_in_model(world, 1e-3) == {}
    assert all(world.asked)
    assert max(world.clocks) >= 1e-3 * sum(world.asked) * 0.999  # except for rounding


def test_a_store_that_counts_asks_the_other_one() -> None:
    counting = CountingStore({"key": "value"})
    assert counting.get("key") == "value"
    assert counting.asked == 1
