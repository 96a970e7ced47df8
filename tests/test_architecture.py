"""The layers: a module imports only from lower ones. This table is the one of the documentation."""

import ast
import functools
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "objcomm"
ARCHITECTURE = PACKAGE.parent / "docs" / "architecture.md"

# A floor may import from all floors above it in this list, never from its own or from below.
FLOORS: list[list[str]] = [
    ["errors"],
    [
        "arrays",
        "authentication",
        "codecs.array_dtypes",
        "codecs.budget",
        "codecs.exceptions",
        "counters",
        "eager",
        "elementwise",
        "environment",
        "frames",
        "memory",
        "sameness",
        "spans",
    ],
    ["backends", "codecs.tensors", "config", "journal", "ops"],
    [
        "codecs.base",
        "codecs.nesting",
        "codecs.paths",
        "codecs.rules",
        "history",
        "message",
        "progress",
    ],
    ["admission", "codecs.registry", "codecs.restricted", "leaves"],
    ["codecs.pickle5", "codecs.plain", "structures"],
    ["answers", "codecs", "manifests", "transport.outage", "transport.record"],
    [
        "coding",
        "outcome",
        "serialization",
        "transport.base",
        "transport.line",
        "transport.liveness",
        "transport.order",
        "transport.pieces",
        "transport.regions",
        "transport.stores",
        "transport.topology",
        "transport.verdict",
        "transport.whereabouts",
    ],
    [
        "transport.bulletin",
        "transport.conflict",
        "transport.creation",
        "transport.device",
        "transport.lane",
        "transport.nccl",
        "transport.proposal",
        "transport.rendezvous",
        "transport.transfers",
    ],
    ["transport.exchange", "transport.gloo"],
    ["transport.mesh", "transport.reduction", "transport.routes"],
    [
        "transport.blame",
        "transport.device_reduction",
        "transport.location",
        "transport.mailbox",
    ],
    ["transport.farewell", "transport.inquiry"],
    ["transport.watch"],
    ["transport.channel"],
    ["transport.pair"],
    ["group"],
    ["absence", "turn", "work", "world"],
    ["exporting", "options", "recorder"],
    ["call", "errand"],
    ["bodies", "folding", "receiving", "sending", "start", "together"],
    ["buckets", "trees"],
    [
        "averages",
        "collectives",
        "consensus",
        "launched",
        "launching",
        "metrics",
        "model",
        "p2p",
        "probing",
        "reductions",
        "scans",
        "scattering",
        "shards",
        "sharing",
        "subgroups",
    ],
    ["control", "nodes", "ordering"],
    [""],
    ["compat.lists", "compat.patching"],
    ["compat.axolotl", "compat.flashy", "compat.speechbrain", "compat.torch"],
    ["inspector.dumps"],
    ["inspector.rows"],
    ["inspector.clocks", "inspector.words"],
    ["inspector.table", "inspector.trace", "inspector.verdict"],
    ["doctor.bounded", "doctor.facts", "doctor.schedule"],
    ["doctor.address", "doctor.evidence", "doctor.interfaces", "doctor.measure"],
    ["doctor.finding", "doctor.host", "doctor.meeting", "doctor.names", "doctor.reach"],
    [
        "doctor.attendance",
        "doctor.examination",
        "doctor.installation",
        "doctor.network",
        "doctor.speed",
    ],
    ["doctor.findings", "doctor.picture", "doctor.table"],
    ["doctor.command"],
    ["__main__"],
    ["demo"],
]
PACKAGES = {"compat", "doctor", "inspector", "transport"}  # hold nothing themselves
FLOOR = {name: number for number, floor in enumerate(FLOORS) for name in floor}

# Only these may start a transfer; only this may translate ranks.
COMMUNICATION = {
    "all_gather",
    "all_reduce",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "scatter",
    "send",
}
TRANSLATION = {"get_process_group_ranks", "get_global_rank", "get_group_rank"}


def name_of(path: Path) -> str:
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def floor_of(name: str) -> int:
    """The floor of a module; packages that have no rooms of their own are one room."""
    while name not in FLOOR and "." in name:
        name = name.rpartition(".")[0]
    return FLOOR[name]


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All that a file's code consists of."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imported_by(path: Path) -> set[str]:
    """First-party modules that a file imports, wherever the import stands."""
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
    """Attributes of ``torch.distributed`` that a file calls."""
    return {
        node.func.attr
        for node in nodes_of(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) in {"dist", "torch.distributed"}
    }


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_to_lower_floors(name: str) -> None:
    for used in imported_by(MODULES[name]):
        is_own_package = floor_of(used) == floor_of(name) == FLOOR["demo"]
        assert floor_of(used) < floor_of(name) or is_own_package, f"{name} imports {used}"


def test_the_table_names_every_module_and_no_other() -> None:
    rooms = {name for name in MODULES if not name.startswith("demo.") and name not in PACKAGES}
    assert rooms == set(FLOOR)


def test_the_documentation_shows_the_same_table() -> None:
    text = ARCHITECTURE.read_text(encoding="utf-8")
    rows = [line.split("|")[2] for line in text.splitlines() if line.startswith("| `")] or [
        line.split("|")[2] for line in text.splitlines() if line[:3].strip("| ").isdigit()
    ]
    documented = [sorted(cell.strip("` ") for cell in row.split(",")) for row in rows]
    expected = [sorted(name or "__init__" for name in floor) for floor in FLOORS]
    assert documented == expected


@pytest.mark.parametrize(
    "name", [name for name in MODULES if not name.startswith(("transport", "demo"))]
)
def test_only_transports_communicate(name: str) -> None:
    assert not calls_on_torch_distributed(MODULES[name]) & COMMUNICATION


@pytest.mark.parametrize("name", [name for name in MODULES if name != "group"])
def test_only_the_group_translates_ranks(name: str) -> None:
    assert not calls_on_torch_distributed(MODULES[name]) & TRANSLATION


def test_the_checks_see_what_they_look_for(tmp_path: Path) -> None:
    room = tmp_path / "room.py"
    room.write_text(
        "import torch.distributed as dist\nfrom objcomm.transport import routes\ndist.send(1)\n"
    )
    assert imported_by(room) == {"transport.routes"}
    assert calls_on_torch_distributed(room) == {"send"}
