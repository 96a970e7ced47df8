"""Network namespaces as hosts: simulate several machines, with a network between them, on one.

``with Hosts(2, mbit=200) as hosts:`` connects two hosts by a switch. Each has its own network card
with a limited rate, address, host name that all hosts resolve to that address, process numbers,
shared memory and ``/etc/hosts``; they share all other files and the clock. The machine's own
network is left alone. The namespaces have no names: they belong to a process that waits for the end
of a pipe. When it ends, also because pytest was killed, everything that runs on the host is killed
and its network is gone.

Knows nothing of torch or of ranks.
"""

import json
import os
import random
import secrets
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import pytest

__all__ = ["Host", "Hosts"]

_NETWORK = "10.77.0"  # in our own namespaces, so it can't collide with anything
_LIMIT_S = 300.0  # only a hang takes this long
# A queue of this many milliseconds, and bursts of this many, let one connection fill a card.
_QUEUE_MS, _BURST_MS = 50, 4
_BURST_MIN_NBYTES = 1 << 16  # one segment of the kernel's
# Preferences of rules: the rule by which a host knows its own addresses must leave room before it.
_FOR_ITSELF, _BEFORE_THAT = 10, 5
# A launcher around this process has set its variables for another job.
_OF_A_JOB = ("MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "GLOO_", "NCCL_", "OBJCOMM_")
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")


class _Room:
    """Namespaces, and the process that keeps them open.

    Attributes:
        pid: the id of a process in all of them.
    """

    def __init__(self, kinds: Sequence[str], furnish: Sequence[str], inside: Sequence[str]) -> None:
        """Create the namespaces.

        Args:
            kinds: the kinds of namespaces, as ``unshare`` and ``nsenter`` name them.
            furnish: a command to run in them before anything else.
            inside: the start of each command that creates or enters them.
        """
        options = [f"--{kind}" for kind in kinds]
        make = [*options, *["--mount-proc"] * ("pid" in kinds)]
        if "user" in kinds:
            make += ["--map-root-user"]
            options += ["--preserve-credentials"]
        hold = ["sh", "-c", '"$@" >&2 && echo ready && exec cat >/dev/null', "sh", *furnish]
        self._holder = subprocess.Popen(
            [*inside, "unshare", "--kill-child", *make, *hold],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        if self._holder.stdout is None or not self._holder.stdout.readline():
            _, errors = self._holder.communicate(timeout=_LIMIT_S)
            raise OSError(errors.decode(errors="replace").strip())
        self.pid = _first_child(self._holder.pid)
        self._enter = [*inside, "nsenter", f"--target={self.pid}", *options]

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the command that runs ``argv`` in the namespaces."""
        return [*self._enter, "--", *argv]

    def run(self, argv: Sequence[str], stdin: str = "") -> str:
        """Return the output of a command in the namespaces, with ``stdin`` as its input.

        Raises:
            subprocess.CalledProcessError: it failed; ``stderr`` has its output.
        """
        return subprocess.run(
            self.command(argv),
            input=stdin,
            capture_output=True,
            text=True,
            check=True,
            timeout=_LIMIT_S,
        ).stdout

    def ip(self, *lines: str) -> None:
        """Run ``ip`` with the given lines."""
        self.run(["ip", "-batch", "-"], "\n".join(lines) + "\n")

    def limit(self, interface: str, mbit: float) -> None:
        """Limit the rate at which a network card sends; replaces an earlier limit."""
        burst = max(_BURST_MIN_NBYTES, int(mbit * 1e6 / 8 * _BURST_MS / 1e3))
        rate = f"rate {mbit}mbit burst {burst} latency {_QUEUE_MS}ms"
        self.run(["tc", "qdisc", "replace", "dev", interface, "root", "tbf", *rate.split()])

    def close(self) -> None:
        """Kill everything in the namespaces, and wait for its end."""
        # The kernel kills its child, too, and with the first process of a namespace all its others.
        self._holder.kill()
        self._holder.communicate(timeout=_LIMIT_S)


def free_port() -> int:
    """Return a free port below those that the kernel assigns.

    The port is not reserved until it is used, so each of pytest's processes chooses among its own.
    """
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    choose = random.SystemRandom()  # pytest-randomly gives every process's `random` one seed
    while True:
        port = choose.randrange(20000 + process, 30000, processes)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def environment_of_no_job() -> dict[str, str]:
    """Return this process's variables without those that a launcher has set."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_OF_A_JOB) and name not in _OF_A_RANK
    }


def _first_child(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return int(children.split()[0])


class Host:
    """A host; ``Hosts`` creates it.

    Attributes:
        name: its host name.
        address: its IPv4 address.
        interface: the name of its network card.
    """

    interface = "eth0"

    def __init__(self, name: str, address: str, room: _Room) -> None:
        self.name = name
        self.address = address
        self._room = room
        self._processes: list[subprocess.Popen[Any]] = []

    def popen(
        self, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command on this host; it is killed with the host at the latest.

        Its process here is the one that entered the host: it gets the command's exit status, but
        signals should be sent to its process group (``os.killpg``), which includes the command.

        Args:
            argv: the command.
            env: additional variables. Those of a launcher around this process are left out.
            options: options of ``subprocess.Popen``.
        """
        folder = os.fspath(options.pop("cwd", None) or Path.cwd())
        # Entering a mount namespace changes the working directory to its root.
        go_there = ["sh", "-c", 'cd "$0" && exec "$@"', folder]
        process: subprocess.Popen[Any] = subprocess.Popen(
            self._room.command([*go_there, *argv]),
            env=environment_of_no_job() | dict(env or {}),
            start_new_session=True,
            **options,
        )
        self._processes.append(process)
        return process

    def run(self, *argv: str) -> str:
        """Return the output of a command on this host.

        Raises:
            subprocess.CalledProcessError: it failed; ``stderr`` has its output.
        """
        return self._room.run(argv)

    def carried_nbytes(self) -> tuple[int, int]:
        """Return the bytes that its network card has sent and received since it was created."""
        (link,) = json.loads(self.run("ip", "-json", "-stats", "link", "show", self.interface))
        return link["stats64"]["tx"]["bytes"], link["stats64"]["rx"]["bytes"]

    def reap(self) -> None:
        """Reap the commands that were killed with the host."""
        for process in self._processes:
            process.wait(_LIMIT_S)


class Hosts:
    """A network of hosts; see the module. If it can't be created, the test is skipped."""

    def __init__(self, count: int, *, mbit: float = 1000.0) -> None:
        """Describe the network; entering the context creates it.

        Args:
            count: number of hosts.
            mbit: the rate of each host's network card, in each direction, in Mbit/s.
        """
        self._count = count
        self._mbit = mbit
        self._hosts: list[Host] = []
        self._rooms: list[_Room] = []
        self._close = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as made:
            try:
                self._make(made)
            except (OSError, subprocess.SubprocessError) as error:
                pytest.skip(f"no hosts of namespaces here: {getattr(error, 'stderr', '') or error}")
            self._close = made.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._close.close()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Host:
        return self._hosts[number]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def unplug(self, number: int) -> None:
        """Unplug a host's cable: everything that it sends and that is sent to it is lost.

        Nothing reports it: a connection notices by its own timeouts, if it has any.
        """
        self._switch.ip(f"link set port{number} down")

    def plug_in(self, number: int) -> None:
        """Plug the cable in again."""
        self._switch.ip(f"link set port{number} up")

    def part(self, one: int, other: int) -> None:
        """Drop packets between two hosts, while both reach all others."""
        self._rooms[one].ip(f"rule add {self._loss_from(other)}")
        self._rooms[other].ip(f"rule add {self._loss_from(one)}")

    def join(self, one: int, other: int) -> None:
        """Let two parted hosts reach each other again."""
        self._rooms[one].ip(f"rule del {self._loss_from(other)}")
        self._rooms[other].ip(f"rule del {self._loss_from(one)}")

    def refuse(self, one: int, other: int) -> None:
        """Reject packets from one host to another, with an immediate error for the sender."""
        self._rooms[one].ip(f"rule add {self._refusal_of(other)}")

    def allow(self, one: int, other: int) -> None:
        """Let a host that was refused reach the other again."""
        self._rooms[one].ip(f"rule del {self._refusal_of(other)}")

    def limit(self, number: int, mbit: float) -> None:
        """Change the rate of one host's network card, in both directions."""
        self._switch.limit(f"port{number}", mbit)
        self._rooms[number].limit(Host.interface, mbit)

    def _loss_from(self, number: int) -> str:
        # On arrival: a rule on the sending side would give the sender an immediate error.
        address = self._hosts[number].address
        return f"pref {_BEFORE_THAT} iif {Host.interface} from {address} blackhole"

    def _refusal_of(self, number: int) -> str:
        return f"pref {_BEFORE_THAT} to {self._hosts[number].address} prohibit"

    def _make(self, made: ExitStack) -> None:
        folder = Path(made.enter_context(tempfile.TemporaryDirectory(prefix="objcomm-hosts-")))
        # No two networks on this machine share a host name, as no two machines should.
        names = [f"host{number}-{secrets.token_hex(2)}" for number in range(self._count)]
        addresses = [f"{_NETWORK}.{number + 1}" for number in range(self._count)]
        lines = [f"{address} {name}\n" for address, name in zip(addresses, names, strict=True)]
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
        (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # no server: fails quickly
        is_root = os.geteuid() == 0
        self._switch = _Room(["net"] if is_root else ["user", "net"], ["true"], [])
        made.callback(self._switch.close)
        self._switch.ip("link add switch type bridge", "link set switch up")
        inside = [] if is_root else self._switch.command([])
        kinds = ("net", "uts", "ipc", "mount", "pid")
        furnish = (
            'hostname "$0" && mount --bind "$1/hosts" /etc/hosts'
            ' && mount --bind "$1/resolv.conf" /etc/resolv.conf && mount -t tmpfs none /dev/shm'
        )
        for number, (name, address) in enumerate(zip(names, addresses, strict=True)):
            command = ["sh", "-c", furnish, name, str(folder)]
            room = _Room(kinds, command, inside)
            host = Host(name, address, room)
            made.callback(host.reap)
            made.callback(room.close)
            self._rooms.append(room)
            self._hosts.append(host)
            self._connect(number)

    def _connect(self, number: int) -> None:
        port, room, host = f"port{number}", self._rooms[number], self._hosts[number]
        self._switch.ip(
            f"link add {port} type veth peer name {host.interface} netns {room.pid}",
            f"link set {port} master switch addrgenmode none up",
        )
        room.ip(
            "link set lo up",
            f"link set {host.interface} addrgenmode none up",
            f"address add {host.address}/24 dev {host.interface}",
            f"rule add pref {_FOR_ITSELF} lookup local",
            "rule del pref 0",
        )
        self.limit(number, self._mbit)
