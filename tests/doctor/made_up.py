"""Facts of jobs that never ran."""

from dataclasses import replace
from typing import Any

from objcomm._bootstrap.doctor.facts import (
    Choice,
    Evidence,
    Interface,
    MeasuredLink,
    Reachable,
    Rendezvous,
    Report,
)

GIB = 1 << 30


def report(rank: int, host: int = 0, **changes: Any) -> Report:
    """A healthy rank on one of several hosts; ``size`` 4 unless it is changed."""
    address = f"10.0.0.{host + 1}"
    healthy = Report(
        rank=rank,
        world_size=4,
        local_rank=rank,
        launcher="torchrun",
        host=f"node{host}",
        machine=f"node{host}/boot",
        pid=1000 + rank,
        versions={"python": "3.11.7", "torch": "2.13.0", "objcomm": "0.1.0"},
        backends=("gloo",),
        backend="gloo",
        shm_nbytes=16 * GIB,
        shm_free_nbytes=15 * GIB,
        open_files=65536,
        open_files_most=65536,
        interfaces=(
            Interface("lo", ("127.0.0.1",), mtu=65536),
            Interface("eth0", (address,), mtu=1500, mbit=10000),
        ),
        gloo=Choice("eth0", address, "the host's name stands for this address"),
        nccl=Choice("eth0", address, "the first that is neither docker*, lo* nor virbr*"),
        rendezvous=Rendezvous("node0", 29500, ("10.0.0.1",), interface="eth0"),
        port=40000 + rank,
        token=f"token{rank}",
    )
    return replace(healthy, **changes)


def evidence(*reports: Report, **changes: Any) -> Evidence:
    """A job of four ranks, two on each of two hosts, all of which reach one another."""
    every = reports or tuple(report(rank, rank // 2) for rank in range(4))
    by_rank = {each.rank: each for each in every}
    reached = {
        rank: tuple(Reachable(peer, "", 0.0, 1e-4) for peer in by_rank if peer != rank)
        for rank in by_rank
    }
    healthy = Evidence(4, by_rank, waited_seconds=30.0, contacts=reached)
    return replace(healthy, **changes)


def links(
    of: Evidence, speeds: dict[tuple[int, int], float] | None = None
) -> tuple[MeasuredLink, ...]:
    """All links of a job: fast within a host, slower between hosts, but for some that are given.

    Args:
        of: the job.
        speeds: bytes per second by source and destination.
    """
    made = []
    for src, here in of.reports.items():
        for dst, there in of.reports.items():
            if src != dst:
                usual = 2e9 if here.machine == there.machine else 1e9
                speed = (speeds or {}).get((src, dst), usual)
                made.append(MeasuredLink(src, dst, 2e-4, speed))
    return tuple(made)
