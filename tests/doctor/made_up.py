"""Invented facts of jobs that never ran."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from objcomm._bootstrap.doctor.facts import Contact, Evidence, Link, Report

GIB = 1 << 30


def report(rank: int, host: int = 0, **changes: Any) -> Report:
    """Return a healthy rank on one of several hosts; ``size`` is 4 unless changed."""
    address = f"10.0.0.{host + 1}"
    healthy = Report(
        rank=rank,
        machine=f"node{host}/boot",
        address=address,
        port=40000 + rank,
        token=f"token{rank}",
        caller=address,
        world_size=4,
        local_rank=rank,
        launcher="torchrun",
        host=f"node{host}",
        pid=1000 + rank,
        versions=(
            ("Python", "3.11.7"),
            ("torch", "2.13.0"),
            ("objcomm", "0.1.0"),
            ("init's backend", "gloo"),
        ),
        shm_free_nbytes=15 * GIB,
        open_files=65536,
        interfaces=(("lo", "127.0.0.1"), ("eth0", address)),
        meeting="node0:29500",
    )
    return replace(healthy, **changes)


def evidence(*reports: Report, **changes: Any) -> Evidence:
    """Return a job of four ranks, two on each of two hosts, that all reach one another."""
    every = reports or tuple(report(rank, rank // 2) for rank in range(4))
    by_rank = {each.rank: each for each in every}
    reached = {rank: tuple(Contact(peer) for peer in by_rank if peer != rank) for rank in by_rank}
    missing = tuple(rank for rank in range(4) if rank not in by_rank)
    healthy = Evidence(4, by_rank, missing, waited_seconds=30.0, contacts=reached)
    return replace(healthy, **changes)


def measured(of: Evidence, speeds: Mapping[tuple[int, int], float] | None = None) -> Evidence:
    """Return a job with measured links: fast within a host, slower between hosts, or as given.

    Args:
        of: the job.
        speeds: bytes per second by source and destination.
    """
    made = []
    for (src, here), (dst, there) in itertools.permutations(of.reports.items(), 2):
        usual = 2e9 if here.machine == there.machine else 1e9
        made.append(Link(src, dst, 2e-4, (speeds or {}).get((src, dst), usual)))
    return replace(of, links=tuple(made))
