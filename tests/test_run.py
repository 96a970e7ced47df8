"""Programs under ``python -m objcomm.run``, compared with the same programs without it."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from objcomm.run import _interpreter_options
from tests.doctor.job import LIMIT_S, ROOT, Agent, Said, by_command, clean_environment
from tests.under_run import RUN, own, python, reported, torchrun

_REPLACED = (
    "in place of torch's all_gather_object, broadcast_object_list, gather_object, "
    "recv_object_list, scatter_object_list, send_object_list"
)
_STARTUP = str(ROOT / "objcomm" / "compat" / "startup")

_SURROUNDINGS = """
import json, os, signal, sys

OF_RUN = {"OBJCOMM_RUN", "PYTHONPATH"}
sys.stdout.write(json.dumps({
    "argv": sys.argv,
    "path": sys.path,
    "main": [__name__, __file__, __package__, getattr(__spec__, "name", None)],
    "is_main": vars(sys.modules["__main__"]) is globals(),
    "options": [str(sys.flags), sys.warnoptions, str(sys._xoptions), sys.stdout.write_through],
    "environment": {name: value for name, value in os.environ.items() if name not in OF_RUN},
    "signals": [str(signal.getsignal(each)) for each in signal.valid_signals()],
    "modules": sorted(set(sys.modules) - {"sitecustomize"}),
    "input": sys.stdin.read(),
}))
"""


def _program(folder: Path, source: str) -> str:
    """Write a program and return its path."""
    path = folder / "train.py"
    path.write_text(source)
    return str(path)


def _objcomm(form: str, folder: Path) -> tuple[str, ...]:
    """Return the words of a command line that mean objcomm's own commands."""
    console = folder / "objcomm"
    console.write_text("from objcomm.__main__ import main\nmain()\n")  # as pip writes it
    return (str(console),) if form == "objcomm" else ("-m", "objcomm")


@pytest.mark.parametrize("options", [(), ("-uWerror", "-X", "utf8", "-B")])
@pytest.mark.parametrize("form", ["script", "module"])
def test_a_program_finds_everything_as_without_objcomm(
    form: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    path = _program(tmp_path, _SURROUNDINGS)
    name = (path,) if form == "script" else ("-m", "train")
    program = (*name, "--report", "-m", "two words", "--", "")
    places = os.pathsep.join([str(ROOT), str(tmp_path)])

    def surroundings(*words: str) -> object:
        command = [sys.executable, *options, *words, *program]
        done = by_command(command, {"PYTHONPATH": places}, stdin="what is piped")
        assert (done.status, done.err) == (0, "")
        return json.loads(done.out)

    assert surroundings(*RUN) == surroundings()


@pytest.mark.parametrize(
    ("before", "options"),
    [
        (["-m", "objcomm.run"], []),
        (["-mobjcomm.run"], []),
        (["-um", "objcomm.run"], ["-u"]),
        (["-X", "dev", "-OOmobjcomm.run"], ["-X", "dev", "-OO"]),
        (["-W", "error", "-m", "objcomm.run"], ["-W", "error"]),
    ],
)
def test_the_options_of_python_itself_are_passed_on(before: list[str], options: list[str]) -> None:
    assert _interpreter_options(before) == options


@pytest.mark.parametrize("form", ["python -m objcomm", "objcomm"])
def test_run_is_a_command_of_the_package_too(form: str, tmp_path: Path) -> None:
    program = _program(tmp_path, _SURROUNDINGS)
    run = python("-O", *_objcomm(form, tmp_path), "run", program, "--report", "-h")
    assert run.status == 0
    found = json.loads(run.out)
    assert found["argv"] == [program, "--report", "-h"]
    assert "optimize=1" in found["options"][0]


_ENDINGS = """
import os, signal, sys
from torch.distributed import all_gather_object, destroy_process_group, init_process_group

init_process_group("gloo", store=__import__("torch").distributed.HashStore(), rank=0, world_size=1)
gathered = [None]
all_gather_object(gathered, os.environ.get("OBJCOMM_RUN", "") != "")
destroy_process_group()
if os.fork() == 0:
    sys.exit()  # it reports nothing, and runs what is registered for the end
os.wait()


def end(way):
    if way == "exit":
        sys.exit(3)
    if way == "interrupt":
        # A job in a shell's background ignores it, and so do its children.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()
    if way == "error":
        try:
            {}["key"]
        except KeyError as error:
            raise ValueError("of the program's own") from error


end(sys.argv[1])
"""


@pytest.mark.parametrize(
    ("way", "status"),
    [
        ("error", 1),
        ("interrupt", -signal.SIGINT),
        pytest.param("exit", 3, marks=pytest.mark.long),
        pytest.param("return", 0, marks=pytest.mark.long),
    ],
)
def test_a_program_ends_as_without_objcomm_and_its_figures_are_reported(
    way: str, status: int, tmp_path: Path
) -> None:
    """It runs without a launcher, and destroys its process group."""
    program = _program(tmp_path, _ENDINGS)
    plain = python(program, way)
    run = python(*RUN, "--report", program, way)
    assert (run.status, run.out, own(run)) == (plain.status, plain.out, plain.err)
    assert run.status == status
    replaced, head, *lines = reported(run)
    assert replaced.endswith(_REPLACED)
    title = r"torch's object collectives on 1 rank, in a program of [\d.]+ s"
    assert re.fullmatch(title, head)
    time = r"\d+\.\d{3} s"
    cost = rf" +1 +1 +0 B  {time} \(rank 0\)  {time}  {time} \(rank 0\)"
    headings = r" +ranks +calls +sent +min +median +max"
    assert re.fullmatch(rf"  function {headings}", lines[0])
    assert re.fullmatch(rf"  all_gather_object {cost}", lines[1])
    assert re.fullmatch(rf"  slowest lines {headings}", lines[2])
    assert re.fullmatch(rf"  {re.escape(program)}:7  all_gather_object {cost}", lines[3])
    assert len(lines) == 4


_RANKS = """
import sys
import objcomm  # before torch, which it imports
from torch.distributed import all_gather_object, broadcast_object_list, gather_object
import torch.distributed as dist
from torch.distributed import checkpoint


class Settings:  # of __main__, where its pickle says that it stands
    def __init__(self, rank):
        self.rank = rank


objcomm.init("gloo")
rank = dist.get_rank()
gathered = [None] * 3
for _ in range(4):
    all_gather_object(gathered, Settings(rank))
assert [type(each) for each in gathered] == [Settings] * 3
assert [each.rank for each in gathered] == [0, 1, 2]
others = dist.new_group([1, 2])
if rank > 0:
    given = ["from the last"] if rank == 2 else [None]
    broadcast_object_list(given, src=2, group=others)
    assert given == ["from the last"]
    box = [None, None] if rank == 2 else None
    gather_object(rank, box, dst=2, group=others)
    assert box == ([1, 2] if rank == 2 else None)
checkpoint.save({"step": 7}, checkpoint_id=sys.argv[1])
assert objcomm.all_gather(rank) == [0, 1, 2]  # the program's own call, which is not reported
calls = {name: of.calls for name, of in objcomm.stats(others if rank else None).items()}
assert calls.get("gather_object") == (1 if rank else 2), calls
objcomm.shutdown()
sys.stdout.write(f"rank {rank} is done\\n")
"""


def test_ranks_of_torchrun_make_their_calls_through_objcomm(tmp_path: Path) -> None:
    program = _program(tmp_path, _RANKS)
    run = torchrun(3, *RUN, "--report", program, str(tmp_path / "checkpoint"))
    assert run.status == 0, run.err
    assert sorted(run.out.splitlines()) == [f"rank {rank} is done" for rank in range(3)]
    replaced, head, *lines = reported(run)
    assert replaced.endswith(_REPLACED)
    assert "object collectives on 3 ranks" in head
    at = next(number for number, line in enumerate(lines) if line.startswith("  slowest lines "))
    functions, slowest = (list(map(_row, part)) for part in (lines[1:at], lines[at + 1 :]))
    # One call of each, on all ranks, is from the checkpoint, which gathers twice.
    assert {name: (ranks, calls) for name, ranks, calls, *_ in functions} == {
        "all_gather_object": ("3", "4"),
        "broadcast_object_list": ("3", "1-2"),
        "gather_object": ("3", "2-3"),
        "scatter_object_list": ("3", "1"),
    }
    for rows in (functions, slowest):
        for *_, least, median, most in rows:
            assert float(least) <= float(median) <= float(most)
        times = [float(most) for *_, most in rows]
        assert times == sorted(times, reverse=True)
    assert len(slowest) == 5
    # Calls of torch's checkpoints are reported at the program's line that saves one.
    saving = _RANKS.splitlines().index('checkpoint.save({"step": 7}, checkpoint_id=sys.argv[1])')
    found = [row[1:3] for row in slowest if row[0] == f"{program}:{saving + 1}  gather_object"]
    assert found == [("3", "2")]


def _row(line: str) -> tuple[str, ...]:
    """Parse a row of the report: name, ranks, calls, and the three times in seconds."""
    time = r"  +([\d.]+) s(?: \(rank \d+\))?"
    row = re.fullmatch(
        rf"  (\S+(?:  \S+)?)  +(\d+)  +([\d-]+)  +[\d.]+ K?B{time}{time}{time}", line
    )
    assert row, line
    return row.groups()


_UNEVEN = """
import os, signal, sys, time
import torch.distributed as dist

ending, rank = sys.argv[1], int(os.environ["RANK"])
dist.init_process_group("gloo")
world = dist.get_world_size()
if not ending.startswith("no calls"):
    for _ in range(2):
        dist.all_gather_object([None] * world, rank)
if rank and ending == "rank 0 is first":
    time.sleep(0.5)
elif rank == world - 1 and ending == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
elif rank == world - 1 and ending == "raises":
    raise ValueError("of this rank")
elif rank == world - 1 and ending.endswith("is stopped"):
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    if ending in {"dies", "raises"}:
        dist.all_gather_object([None] * world, rank)
finally:
    if ending != "does not destroy":
        dist.destroy_process_group()
"""


def _job(program: str, size: int, ending: str) -> list[Said]:
    """Return how the ranks of a program end without a launcher that ends them when one fails."""
    agent = Agent()
    with contextlib.ExitStack() as stack:
        ranks = [
            subprocess.Popen(
                [sys.executable, *RUN, "--report", program, ending],
                env=clean_environment() | agent.place(rank, size),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        for each in ranks:
            stack.callback(each.wait)
            stack.callback(each.kill)
        said = []
        for each in ranks:
            if ending.endswith("is stopped") and each is ranks[-1]:
                each.kill()  # the others have ended
            out, err = each.communicate(timeout=LIMIT_S)
            said.append(Said(each.returncode, out, err))
    return said


@pytest.mark.parametrize(
    ("ending", "size"),
    [
        ("does not destroy", 2),
        pytest.param("rank 0 is first", 4, marks=pytest.mark.long),
        ("no calls", 2),
        ("no calls, and one is stopped", 2),
        ("dies", 4),
        ("raises", 3),
        ("is stopped", 2),
    ],
)
def test_only_rank_0_reports_and_for_all_ranks(ending: str, size: int, tmp_path: Path) -> None:
    first, *others = _job(_program(tmp_path, _UNEVEN), size, ending)
    assert [reported(each) for each in others] == [[]] * (size - 1)
    replaced, head, *lines = reported(first)
    assert replaced.endswith(_REPLACED)
    late = "without rank 1: not at the end within 5 s of rank 0"
    if ending.startswith("no calls"):
        assert re.fullmatch(r"no call of torch's object collectives in [\d.]+ s \(.*\)", head)
        assert lines == ([] if ending == "no calls" else [late])
        return
    ranks = size - (ending in {"dies", "is stopped"})
    assert f"on {ranks} rank{'s' if ranks > 1 else ''}, in" in head
    calls = {"dies": "3", "raises": "2-3"}.get(ending, "2")
    assert _row(lines[1])[:3] == ("all_gather_object", str(ranks), calls)
    missing = [line for line in lines if line.startswith("without ")]
    assert missing == {
        "dies": [f"without rank {size - 1}: ended before it could report"],
        "is stopped": [late],
    }.get(ending, [])


def test_the_page_shows_the_report(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "migrating" / "unchanged.md").read_text()
    (program,) = re.findall(r"^```python .*?\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    _program(tmp_path, program)
    (shown,) = re.findall(
        r"^\$ (?:torchrun .* train.py)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE
    )
    with contextlib.chdir(tmp_path):
        run = torchrun(2, *RUN, "--report", "train.py")
    assert run.status == 0, run.err

    def without_times(lines: list[str]) -> list[str]:
        return [re.sub(r" *[\d.]+ s\b| \(rank \d\)", "…", line) for line in lines]

    assert without_times(reported(run)) == without_times(reported(Said(0, "", shown)))


def test_the_readme_shows_the_error_of_its_program(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    ((command, program, shown),) = re.findall(
        r"^```sh\n(.*?)\n```$.*?^```py\n(.*?)^```$.*?^```pytb\n(.*?)\n```$",
        readme,
        re.DOTALL | re.MULTILINE,
    )
    assert command == "torchrun --nproc-per-node=2 -m objcomm.run train.py"
    _program(tmp_path, program)
    with contextlib.chdir(tmp_path):
        run = torchrun(2, *RUN, "train.py")
    errors = re.findall(r"^\[rank[01]\]: (objcomm\.DesyncError: .*)", own(run), re.MULTILINE)
    assert errors
    assert {re.sub(r"\S*/", "", error) for error in errors} == {" ".join(shown.split())}


_SPAWNING = """
import sys
import torch
from torch import multiprocessing
from torch.distributed import all_gather_object
import torch.distributed as dist
from torch.utils.data import DataLoader


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, at):
        return at * at


def train(rank, path, settings):
    import objcomm

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    gathered = [None, None]
    all_gather_object(gathered, (rank, settings))
    assert [each for each, _ in gathered] == [0, 1]
    assert {type(each) for _, each in gathered} == {Squares}
    calls = objcomm.stats()["all_gather_object"].calls
    dist.destroy_process_group()
    sys.stdout.write(f"rank {rank}: {calls}\\n")


if __name__ == "__main__":
    multiprocessing.spawn(train, (sys.argv[1], Squares()), nprocs=2)
    loader = DataLoader(Squares(), batch_size=None, num_workers=1, multiprocessing_context="spawn")
    sys.stdout.write(f"{[int(each) for each in loader]}\\n")
"""


def test_processes_that_a_program_spawns_are_reached(tmp_path: Path) -> None:
    """Both ranks' calls go through objcomm: one in objcomm would wait for one in torch."""
    program = _program(tmp_path, _SPAWNING)
    run = python(*RUN, "--report", program, str(tmp_path / "store"))
    assert run.status == 0, run.err
    *ranks, squares = run.out.splitlines()
    assert sorted(ranks) == ["rank 0: 1", "rank 1: 1"]
    assert squares == "[0, 1, 4, 9]"
    replaced, head, *lines, last = reported(run)
    assert "object collectives on 2 ranks" in head
    assert _row(lines[1])[:3] == ("all_gather_object", "2", "1")
    # Then the program itself, which made no call; nothing from the loader's worker.
    assert re.match(r"no call of torch's object collectives in [\d.]+ s \(process ", last)
    assert len(lines) == 4
    assert replaced.endswith(_REPLACED)


@pytest.mark.long  # five processes import torch
def test_one_command_before_a_launcher_reaches_its_ranks(tmp_path: Path) -> None:
    program = _program(
        tmp_path,
        """
import objcomm
objcomm.init("gloo")
import torch.distributed as dist
dist.all_gather_object([None, None], 1)
assert objcomm.stats()["all_gather_object"].calls == 1
objcomm.shutdown()
""",
    )
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    run = python(*RUN, *launcher, program)
    assert run.status == 0, run.err
    assert len(reported(run)) == 1


def test_another_sitecustomize_is_still_read(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("IS_READ = True\n")
    path = os.pathsep.join([_STARTUP, str(tmp_path)])
    program = "import sitecustomize, sys; print(sitecustomize.IS_READ, sys.path[1])"
    assert python("-c", program, PYTHONPATH=path).out == f"True {tmp_path}\n"
    (tmp_path / "sitecustomize.py").write_text("import missing_from_all\n")
    assert "missing_from_all" in python("-c", "", PYTHONPATH=path).err


@pytest.mark.parametrize(("prefix", "count"), [(sys.prefix, 1), ("/another/environment", 0)])
def test_a_python_of_another_environment_is_left_alone(prefix: str, count: int) -> None:
    program = "import sys; print([type(each).__name__ for each in sys.meta_path].count('_Finder'))"
    run = python("-c", program, PYTHONPATH=_STARTUP, OBJCOMM_RUN=f"1 0 {prefix}")
    assert (run.status, run.out, run.err) == (0, f"{count}\n", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*RUN, "--report"), "name a script, or a module after -m"),
        ((*RUN, "-m"), "name a script, or a module after -m"),
        ((*RUN, "-c", "print()"), "-c is not an option; name a script, or a module after -m"),
        ((*RUN, "--rep", "train.py"), "unrecognized arguments: --rep"),
        ((*RUN, "torchrun", "train.py"), "torchrun starts the ranks, so it comes first"),
        (("-E", *RUN, "train.py"), "Python's options -E, -I and -S keep it from"),
    ],
)
def test_a_wrong_command_line_is_explained(words: tuple[str, ...], message: str) -> None:
    run = python(*words)
    assert run.status == 2
    assert message in run.err


@pytest.mark.parametrize("form", ["python -m objcomm", "objcomm"])
def test_help_shows_the_command_as_it_was_typed(form: str, tmp_path: Path) -> None:
    words = _objcomm(form, tmp_path)
    whole = python(*words, "--help").out
    assert whole.startswith(f"usage: {form} ")
    for command in ("run", "doctor", "inspect"):
        assert re.search(rf"^    {command} ", whole, re.MULTILINE)
        assert python(*words, command, "--help").out.startswith(f"usage: {form} {command} ")
    for command, option in (("doctor", "--nproc"), ("inspect", "--last")):
        wrong = python(*words, command, option, "many").err
        assert wrong.startswith(f"usage: {form} {command} ")
    wrong = python(*words, "run", "torchrun", "train.py").err
    assert wrong.endswith(f"see the examples of {form} run --help\n")
    assert f"Example: {form} inspect records/" in python(*words, "inspect", "--help").out


def test_help_says_how_ranks_are_started() -> None:
    run = python(*RUN, "--help")
    assert run.status == 0
    assert run.out.startswith("usage: python -m objcomm.run ")
    assert "torchrun --nproc-per-node=4 -m objcomm.run train.py" in run.out
    assert python(*RUN, "-h").out == run.out
