"""A world of one on a system without Linux; ``sitecustomize`` says what Python lacks there."""

import re
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.doctor.job import ROOT, by_command

pytestmark = pytest.mark.long  # each starts one or more Pythons, and no other test waits for them

_FOLDER = Path(__file__).parent


def run(*words: str, statuses: Collection[int] = (0,)) -> str:
    """Return what a Python without Linux prints, including its child processes."""
    done = by_command([sys.executable, *words], {"PYTHONPATH": str(_FOLDER)}, cwd=ROOT)
    printed = done.out + done.err
    assert done.status in statuses, printed
    return printed


def test_it_lacks_the_features_of_linux() -> None:
    run("-m", "tests.without_linux.lacking")


def test_every_public_name_does_what_its_example_shows() -> None:
    run("-m", "tests.without_linux.examples")


def test_a_whole_program_runs(tmp_path: Path) -> None:
    run("-m", "tests.without_linux.program", str(tmp_path))
    printed = run("-m", "objcomm", "inspect", str(tmp_path / "rank0.json"))
    assert "all_gather" in printed
    assert "rank 0" in printed


def test_the_doctor_reports_the_system_and_finds_no_fault() -> None:
    printed = run("-m", "objcomm", "doctor", statuses=(0, 1))
    # The speed of this machine's resolver is not tested.
    assert set(re.findall(r"(?:WARNING|ERROR) (\S+):", printed)) <= {"slow-names"}
    assert "NOTE system" in printed
    assert "the system is 'darwin', and several ranks have only been tested on Linux" in printed
    assert "shared-memory" not in printed


@pytest.mark.parametrize("options", [(), ("--report",)], ids=["quiet", "report"])
def test_an_unchanged_program_runs_alone(tmp_path: Path, options: tuple[str, ...]) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "import sys\n"
        "import torch.distributed as dist\n"
        "box = ['mine']\n"
        "dist.broadcast_object_list(box)\n"
        "print(sys.platform, box, sys.argv[1:])\n"
    )
    printed = run("-m", "objcomm.run", *options, str(program), "--lr", "0.1")
    assert "darwin ['mine'] ['--lr', '0.1']" in printed
    assert "in place of torch's" in printed
    assert ("slowest lines" in printed) == bool(options)


@pytest.mark.parametrize("nproc", [1, 2])
def test_launch_runs_processes_and_explains_why_they_cannot_join(nproc: int) -> None:
    printed = run(
        "-c",
        f"""if True:
        import sys
        import objcomm
        assert objcomm.launch(lambda: sys.platform, {nproc}, joined=False) == ["darwin"] * {nproc}
        try:
            objcomm.launch(objcomm.world_size, {nproc})
        except objcomm.LaunchError as error:
            assert sorted(error.failures) == list(range({nproc}))
            print(error)
        assert objcomm.broadcast("alone") == "alone"
        """,
    )
    assert "torch's Gloo can't be used on this system ('darwin': " in printed
    assert "a world of one needs no backend" in printed
