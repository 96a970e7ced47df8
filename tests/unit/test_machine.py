"""By what name ranks know that they share a host."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from objcomm.transport.rendezvous import machine

_TELL = [sys.executable, "-c", "from objcomm.transport.rendezvous import machine; print(machine())"]


def told_by(*command: str) -> str:
    """What another process calls its host; skips where that process may not be started."""
    done = subprocess.run(  # our own interpreter, our own text
        [*command, *_TELL], capture_output=True, text=True, timeout=100, check=False
    )
    if command and done.returncode != 0:
        pytest.skip(f"{command[0]} is not permitted: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_two_processes_of_one_host_give_one_name() -> None:
    assert told_by() == machine()


@pytest.mark.skipif(not shutil.which("unshare"), reason="there is no unshare")
@pytest.mark.parametrize("room", ["--net", "--ipc"])
def test_processes_with_other_namespaces_are_on_other_hosts(room: str) -> None:
    assert told_by("unshare", room) != machine()


def test_another_host_name_is_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine()
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    assert machine() != here


def test_without_proc_the_network_card_tells_hosts_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError("/proc")

    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr("socket.gethostname", lambda: "host")
    names = set()
    for node in (0x0242AC110002, 0x0242AC110003):
        monkeypatch.setattr("uuid.getnode", lambda node=node: node)
        names.add(machine())
    assert len(names) == 2


def test_an_invented_number_of_a_card_tells_no_hosts_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise PermissionError("/proc")

    monkeypatch.setattr(Path, "read_text", missing)
    names = set()
    for node in (0x0342AC110002, 0xFFEEAC110003):  # each process invents its own
        monkeypatch.setattr("uuid.getnode", lambda node=node: node)
        names.add(machine())
    assert len(names) == 1
