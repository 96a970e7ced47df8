"""Rooms import only from lower rooms. The table is the one in the documentation."""

import ast
import functools
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.modules import MODULES, PACKAGE

ARCHITECTURE = PACKAGE.parent / "docs" / "architecture.md"
# A room may import from rooms on lower floors, which are listed above it here, and from itself.
FLOORS = [
    ["errors"],
    ["_config", "_environment"],
    ["_codecs", "_world"],
    ["_wire"],
    ["_observe"],
    ["_transport"],
    ["_algorithms", "_failures"],
    ["_calls"],
    ["_collectives", "_p2p"],
    ["_bootstrap", "_training"],
    ["codecs", "exporters", "metrics", "models", "recorder"],
    ["_public"],
    ["__init__"],
    ["__main__", "compat", "demo", "run"],
]
FLOOR = {room: number for number, floor in enumerate(FLOORS, 1) for room in floor}
# Only the transport and the link between accelerators may start a transfer; the demo compares with
# torch. Only the world may ask for a group's ranks.
COMMUNICATION = {
    "all_gather", "all_reduce", "broadcast", "gather", "recv", "reduce", "scatter", "send",
}  # fmt: skip
TRANSLATION = {"get_process_group_ranks", "get_global_rank", "get_group_rank"}


def room_of(name: str) -> str:
    """Return the folder or file directly below the package that contains a module."""
    return name.partition(".")[0] or "__init__"


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """List the AST nodes of a file."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imported_by(path: Path) -> set[str]:
    """List the first-party modules that a file imports, anywhere in it."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [each for each in inner if each.removeprefix("objcomm.") in MODULES]
            if len(names) < len(inner):
                names.append(node.module)
        else:
            continue
        found |= {
            name.removeprefix("objcomm").lstrip(".")
            for name in names
            if name.split(".")[0] == "objcomm"
        }
    return found


def calls_on_torch_distributed(path: Path) -> set[str]:
    """List the attributes of ``torch.distributed`` that a file calls."""
    return {
        node.func.attr
        for node in nodes_of(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) in {"dist", "torch.distributed"}
    }


@pytest.mark.parametrize("name", MODULES)
def test_a_room_imports_from_lower_floors_only(name: str) -> None:
    room = room_of(name)
    for used in imported_by(MODULES[name]):
        assert room_of(used) == room or FLOOR[room_of(used)] < FLOOR[room], f"{name} imports {used}"


def test_no_modules_import_each_other_in_a_cycle() -> None:
    TopologicalSorter({name: imported_by(MODULES[name]) - {name} for name in MODULES}).prepare()


def test_the_table_names_every_room_and_no_other() -> None:
    assert {room_of(name) for name in MODULES} == set(FLOOR)


def test_a_stranger_can_read_the_tree() -> None:
    """This is the purpose of the rooms; see the documentation."""
    assert len([room for room in FLOOR if (PACKAGE / room).is_dir()]) <= 13
    private = [path for path in PACKAGE.glob("_*.py") if not path.name.startswith("__")]
    assert len(private) <= 4
    assert len(FLOORS) <= 14


def test_the_documentation_shows_the_same_table() -> None:
    text = ARCHITECTURE.read_text(encoding="utf-8")
    rows = [line.split("|") for line in text.splitlines() if re.match(r"\| \d", line)]
    documented = {
        (int(row[1]), room := row[2].strip(" `"), *(f"{room}.{name}" for name in _names(row[3])))
        for row in rows
    }
    actual = {
        (number, room, *(name for name in MODULES if is_module_of(name, room)))
        for room, number in FLOOR.items()
    }
    assert documented == actual


def is_module_of(name: str, room: str) -> bool:
    """Return whether it is a module of a room that is a folder, but not the folder itself."""
    return room_of(name) == room and "." in name and MODULES[name].name != "__init__.py"


def _names(cell: str) -> list[str]:
    return sorted(name for each in cell.split(",") if (name := each.strip(" `–")))


@pytest.mark.parametrize("name", MODULES)
def test_only_transports_communicate(name: str) -> None:
    is_transport = room_of(name) in {"_transport", "demo"} or name == "_algorithms.device"
    assert is_transport or not calls_on_torch_distributed(MODULES[name]) & COMMUNICATION


@pytest.mark.parametrize("name", MODULES)
def test_only_the_world_reads_a_groups_ranks(name: str) -> None:
    assert name == "_world" or not calls_on_torch_distributed(MODULES[name]) & TRANSLATION


def test_the_checks_find_violations(tmp_path: Path) -> None:
    room = tmp_path / "room.py"
    room.write_text(
        "import torch.distributed as dist\nfrom objcomm._algorithms import routes\ndist.send(1)\n"
    )
    assert imported_by(room) == {"_algorithms.routes"}
    assert calls_on_torch_distributed(room) == {"send"}
