"""Conclusions from invented facts: what is found, which ranks it concerns, and what to set."""

from dataclasses import replace
from typing import Any

import pytest

from objcomm._bootstrap.doctor.facts import UNKNOWN, Contact, Evidence, Lookup
from objcomm._bootstrap.doctor.findings import Finding, Severity, findings, status
from tests.doctor.made_up import evidence, measured, report

LOOPBACK = "127.0.0.1"


def only(of: Evidence, name: str, *ranks: int) -> Finding:
    """Return the one finding, which must have this name and concern these ranks."""
    (found,) = findings(of)
    assert (found.name, found.ranks) == (name, ranks)
    return found


def with_one(rank: int, **changes: Any) -> Evidence:
    """Return a healthy job except for one rank."""
    whole = evidence()
    changed = replace(whole.reports[rank], **changes)
    return replace(whole, reports={**whole.reports, rank: changed})


def with_version(rank: int, package: str, version: str) -> Evidence:
    """Return a healthy job in which one rank has another version of a package."""
    return with_one(rank, versions=tuple({**dict(report(0).versions), package: version}.items()))


def unreached(whole: Evidence, *pairs: tuple[int, int], problem: str = "no answer") -> Evidence:
    """Return the same job with some ranks unreachable."""
    made = {
        rank: tuple(
            Contact(each.peer, problem if (rank, each.peer) in pairs else "") for each in contacts
        )
        for rank, contacts in whole.contacts.items()
    }
    return replace(whole, contacts=made)


def test_a_healthy_job_has_no_finding() -> None:
    whole = evidence()
    assert whole.is_whole
    assert findings(measured(whole)) == []
    assert status([]) == 0


def test_the_worst_comes_first_and_notes_do_not_count() -> None:
    changes: dict[str, Any] = {"system": "darwin", "shm_free_nbytes": UNKNOWN}
    note = only(Evidence(1, {0: report(0, world_size=1, **changes)}), "system", 0)
    assert note.severity is Severity.NOTE
    assert status([note]) == 0
    worse = with_one(1, system="darwin", open_files=10)
    assert [each.severity.name for each in findings(worse)] == ["ERROR", "WARNING"]
    assert status(findings(worse)) == 1


def test_missing_ranks_are_named() -> None:
    found = only(evidence(report(0), report(2)), "missing-ranks", 1, 3)
    assert found.severity is Severity.ERROR
    assert found.what == "did not arrive within 30 s; ranks 0, 2 did"
    # Without rank 0, the others report what they have seen.
    found = only(Evidence(4, {2: report(2)}, (0, 3), waited_seconds=5.0), "missing-ranks", 0, 3)
    assert found.what == "did not arrive within 5 s; ranks 1-2 did"


def test_duplicate_ranks_are_named_before_missing_ranks() -> None:
    double = report(1, host=1, pid=7)
    found = findings(evidence(report(0), report(1), report(2), others=(double,)))
    assert [each.name for each in found] == ["duplicate-rank", "missing-ranks"]
    assert "pid 1001 on node0, pid 7 on node1" in found[0].what
    assert "another's rank" in found[1].remedy


def test_a_different_world_size_is_reported() -> None:
    found = only(evidence(others=(report(5, world_size=8),)), "world-size", 5)
    assert found.what == "WORLD_SIZE=8, but on rank 0 it is 4"


def test_a_rank_that_stopped_answering_is_reported() -> None:
    only(evidence(silent=(3,)), "silent-ranks", 3)


def test_wrong_variables_are_reported_with_a_remedy() -> None:
    problem = "RANK=4 is not between 0 and WORLD_SIZE=4 - 1; count from 0"
    odd = report(UNKNOWN, place_problem=problem)
    found = only(Evidence(1, {UNKNOWN: odd}), "variables", UNKNOWN)
    assert found.what.startswith("RANK=4 is not between")
    assert found.remedy == "count from 0"
    assert found.where == "a process on node0"


def test_an_unreachable_rendezvous_is_the_only_finding() -> None:
    odd = report(2, meeting_problem="node9: no answer; or so; set MASTER_ADDR")
    found = only(Evidence(4, {2: odd}), "rendezvous", 2)
    assert (found.what, found.remedy) == ("node9: no answer; or so", "set MASTER_ADDR")


@pytest.mark.parametrize(("devices", "severity"), [((), "WARNING"), (("H200",), "ERROR")])
def test_one_local_rank_for_two_ranks_of_a_host(devices: tuple[str, ...], severity: str) -> None:
    local_ranks = [0, 0, 2, 3]
    reports = [
        report(rank, rank // 2, local_rank=local_ranks[rank], devices=devices) for rank in range(4)
    ]
    found = only(evidence(*reports), "local-rank", 0, 1)
    assert found.severity.name == severity


def test_an_interface_that_gloo_cannot_use() -> None:
    chosen = (("GLOO_SOCKET_IFNAME", "eth7"),)
    whole = with_one(3, address="", gloo_problem="Unable to find address", variables=chosen)
    assert not whole.is_whole
    # The interface explains what cannot be reached.
    found = only(unreached(whole, (0, 3), (1, 3), (2, 3)), "gloo-interface", 3)
    assert found.what == (
        "GLOO_SOCKET_IFNAME=eth7, but Gloo can't listen: Unable to find address; "
        "the host has lo, eth0"
    )
    assert found.remedy == "set GLOO_SOCKET_IFNAME=eth0"


@pytest.mark.parametrize(
    ("caller", "remedy"),
    [
        ("10.1.0.1", "set GLOO_SOCKET_IFNAME=bond0"),
        ("127.0.0.1", "set GLOO_SOCKET_IFNAME=eth0"),
        ("", "set GLOO_SOCKET_IFNAME=eth0"),
    ],
)
def test_the_suggested_interface_leads_to_the_store_or_else_to_another_network(
    caller: str, remedy: str
) -> None:
    there = (("lo", "127.0.0.1"), ("eth0", "10.0.0.1"), ("bond0", "10.1.0.1"))
    odd = {"gloo_problem": "Unable to find address", "interfaces": there, "caller": caller}
    assert only(with_one(0, **odd), "gloo-interface", 0).remedy == remedy
    bare = only(with_one(0, **odd | {"interfaces": ()}), "gloo-interface", 0)
    assert bare.remedy == "unset GLOO_SOCKET_IFNAME, or add a network interface"
    assert "the host has no interface" in bare.what


def test_loopback_is_wrong_between_hosts_and_right_on_one() -> None:
    whole = unreached(with_one(2, address=LOOPBACK), (0, 2), (1, 2), (2, 0))
    found = only(whole, "gloo-loopback", 2)
    assert found.remedy.startswith("set GLOO_SOCKET_IFNAME=eth0, or let the host's name")
    here = [report(rank, address=LOOPBACK) for rank in range(4)]
    assert findings(evidence(*here)) == []
    alike = {rank: replace(each, host="node") for rank, each in whole.reports.items()}
    assert "gloo-loopback" in {each.name for each in findings(replace(whole, reports=alike))}


def test_hosts_that_cannot_reach_each_other_are_one_finding() -> None:
    pairs = [(rank, peer) for rank in (0, 1) for peer in (2, 3)]
    both = [*pairs, *((peer, rank) for rank, peer in pairs)]
    whole = unreached(evidence(), *both)
    assert not whole.is_whole
    found = only(whole, "unreachable", 0, 1, 2, 3)
    assert found.hosts == ("node0", "node1")
    assert found.what == "ranks 0-1 and ranks 2-3 can't reach each other at 10.0.0.2: no answer"


def test_packets_that_are_lost_both_ways_are_one_finding_however_each_end_sees_it() -> None:
    there = unreached(evidence(), (0, 3), problem="no answer")
    back = unreached(evidence(), (3, 0), problem="no route to it")
    both = replace(there, contacts={**there.contacts, 3: back.contacts[3]})
    found = only(both, "unreachable", 0, 3)
    assert found.hosts == ("node0", "node1")
    assert found.what == (
        "rank 0 and rank 3 can't reach each other at 10.0.0.2: no answer or no route to it"
    )


def test_packets_lost_in_one_direction_are_reported_as_such() -> None:
    found = only(unreached(evidence(), (0, 3), problem="connection refused"), "unreachable", 0, 3)
    assert found.what == "rank 0 can't reach rank 3 at 10.0.0.2: connection refused"


def test_names_that_are_slow_to_be_looked_up_on_the_stores_host() -> None:
    quick = Lookup(1, 0, "::ffff:10.0.0.1", 0.01, 50)
    slow = Lookup(1, 2, "::ffff:10.0.0.2", 5.01, 7)
    found = only(evidence(lookups=(quick, slow)), "slow-names", 2)
    assert (found.hosts, found.severity) == (("node1",), Severity.WARNING)
    assert (
        "on node0 the name of ::ffff:10.0.0.2 took 5.0 s, the slowest of 7 look-ups" in found.what
    )
    # The fast lookup may have been luck.
    assert found.remedy.startswith(
        "add to /etc/hosts on node0 the lines '::ffff:10.0.0.1 node0', '::ffff:10.0.0.2 node1'; or"
    )


def test_the_line_for_a_name_on_one_host_and_lines_for_many() -> None:
    slow = Lookup(0, 0, "::ffff:127.0.0.1", 1.0, 1)
    found = only(evidence(lookups=(slow,)), "slow-names", 0)
    assert "/etc/hosts on node0 the line '::ffff:127.0.0.1 localhost'; or" in found.remedy
    several = tuple(replace(slow, address=f"::ffff:10.0.0.{number}") for number in range(10))
    found = only(evidence(lookups=several), "slow-names", 0)
    assert "'::ffff:10.0.0.7 node0' and 2 more; or" in found.remedy


def test_fast_name_lookups_are_not_a_finding() -> None:
    assert findings(evidence(lookups=(Lookup(0, 2, "::ffff:10.0.0.2", 0.02, 50),))) == []
    nobody = Lookup(0, 9, "::ffff:10.0.0.9", 5.0, 1)  # from a stranger, for no rank of the job
    assert findings(evidence(lookups=(nobody,))) == []


@pytest.mark.parametrize(
    ("package", "version", "severity"),
    [("torch", "2.12.0", "ERROR"), ("objcomm", "0.2.0", "ERROR"), ("Python", "3.12.1", "WARNING")],
)
def test_versions_that_differ(package: str, version: str, severity: str) -> None:
    found = only(with_version(2, package, version), "versions", 2)
    assert found.severity.name == severity
    assert version.rpartition(".")[0] in found.what


def test_a_different_python_patch_release_is_not_a_finding() -> None:
    assert findings(with_version(2, "Python", "3.11.9")) == []


def test_backends_that_init_would_choose_differently() -> None:
    found = only(with_version(0, "init's backend", "cpu:gloo,cuda:nccl"), "versions", 0)
    assert found.severity is Severity.ERROR
    assert found.what.startswith("init's backend differs between ranks")
    assert found.remedy.startswith("give init the same backend= on every rank")


def test_a_rank_without_a_device() -> None:
    job = with_one(3, device_problem="rank 3 of 2 devices; start fewer")
    assert only(job, "devices", 3).remedy == "start fewer"


@pytest.mark.parametrize(
    ("limit", "severity"), [(30, "ERROR"), (37, "ERROR"), (38, "WARNING"), (285, "WARNING")]
)
def test_too_few_open_files(limit: int, severity: str) -> None:
    found = only(with_one(1, open_files=limit), "open-files", 1)
    assert found.severity.name == severity
    assert found.remedy.startswith("run ulimit -n 286 before the program")
    assert findings(with_one(1, open_files=286)) == []


@pytest.mark.parametrize("free", [64 << 20, 1 << 20, UNKNOWN])
def test_too_little_shared_memory(free: int) -> None:
    found = only(with_one(1, shm_free_nbytes=free), "shared-memory", 1)
    assert found.severity is Severity.WARNING
    assert "--shm-size" in found.remedy


def with_speeds(slow: dict[tuple[int, int], float]) -> Evidence:
    return measured(evidence(*[report(rank, rank) for rank in range(4)]), slow)


def test_a_host_whose_links_are_all_slow_is_one_finding() -> None:
    # Half of all links: their median would be slow, too.
    slow = {pair: 2e8 for rank in range(3) for pair in ((rank, 3), (3, rank))}
    found = only(with_speeds(slow), "slow-link", 3)
    assert found.hosts == ("node3",)
    assert found.what == (
        "rank 0 to rank 3 (200 MB/s), rank 1 to rank 3 (200 MB/s), rank 2 to rank 3 (200 MB/s), "
        "rank 3 to rank 0 (200 MB/s), rank 3 to rank 1 (200 MB/s), rank 3 to rank 2 (200 MB/s), "
        "where 1e+03 MB/s is usual between hosts"
    )


def test_a_host_that_only_sends_slowly() -> None:
    found = only(with_speeds({(3, rank): 2e8 for rank in range(3)}), "slow-link", 3)
    assert found.what.startswith("rank 3 to rank 0 (200 MB/s), rank 3 to rank 1 (200 MB/s)")


def test_all_ranks_of_a_slow_host_are_named_and_a_few_of_their_links() -> None:
    whole = evidence(
        *[report(rank, rank // 2, world_size=8) for rank in range(8)], world_size=8, missing=()
    )
    slow = {pair: 1e8 for rank in range(6) for odd in (6, 7) for pair in ((rank, odd), (odd, rank))}
    found = only(measured(whole, slow), "slow-link", 6, 7)
    assert found.hosts == ("node3",)
    assert " and 16 more, where 1e+03 MB/s is usual" in found.what


def test_one_slow_link_is_named_by_its_ends() -> None:
    found = only(with_speeds({(1, 2): 2e8}), "slow-link", 1, 2)
    assert found.what.startswith("rank 1 to rank 2 (200 MB/s), where")


def test_links_within_a_host_are_not_compared_with_those_between() -> None:
    slow = {(src, dst): 1.2e8 for src in (0, 1) for dst in (2, 3)}
    slow |= {(dst, src): speed for (src, dst), speed in slow.items()}
    assert findings(measured(evidence(), slow)) == []


def test_a_network_that_is_slow_everywhere() -> None:
    found = only(
        with_speeds({(src, dst): 5e7 for src in range(4) for dst in range(4)}), "slow-network"
    )
    assert "50 MB/s" in found.what


def test_messages_that_take_long() -> None:
    whole = measured(evidence())
    late = tuple(
        replace(each, latency_seconds=0.05) if {each.src, each.dst} == {0, 1} else each
        for each in whole.links
    )
    found = only(replace(whole, links=late), "late-link", 0, 1)
    assert "rank 1 to rank 0 (50.00 ms for a message), where 0.20 ms for a message is" in found.what


def test_a_measurement_that_failed_is_reported() -> None:
    only(evidence(failures={1: "DistNetworkError: gone", 2: ""}), "group", 1)


def test_every_finding_says_what_to_do() -> None:
    odd = report(3, 1, open_files=10, shm_free_nbytes=1, address=LOOPBACK)
    found = findings(evidence(report(0), report(1), odd))
    assert len(found) > 3
    assert all(each.remedy and each.what for each in found)


def test_a_few_hosts_are_named_and_the_others_counted() -> None:
    hosts = tuple(f"node{number}" for number in range(7))
    found = Finding(Severity.ERROR, "group", tuple(range(7)), hosts, "", "")
    assert found.where == "ranks 0-6 on node0, node1, node2, node3 and 3 more"


def test_one_of_several_ranks_on_another_system_is_a_warning() -> None:
    # That system has no /dev/shm, which is a finding on Linux only.
    found = only(with_one(2, system="darwin", shm_free_nbytes=UNKNOWN), "system", 2)
    assert found.severity is Severity.WARNING
    assert "'darwin'" in found.what
    assert "Linux" in found.remedy
