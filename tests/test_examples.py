"""Each example under torchrun and alone: the output is the same, and its claims are true.

All run in one process per rank, see ``example_runner``; one also runs as a reader would start it.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.doctor.job import LIMIT_S, Said
from tests.once import once
from tests.under_run import python, torchrun

# The examples' dependencies are imported only where they are used: that takes seconds, and pytest
# reads this file even if none of it runs.

_ROOT = Path(__file__).parents[1]
_EXAMPLES = _ROOT / "examples"
OWN_START = "survive_a_death"  # starts its ranks itself
NAMES = sorted({path.stem for path in _EXAMPLES.glob("[!_]*.py")} - {OWN_START})
TIMED = "replace_broadcast_object_list"  # its figures vary between runs

#: Number of ranks to start; 0 means without torchrun. Two ranks get unequal shares of the data.
WORLDS = {f"world{size}": size for size in (0, 1, 2)}
TESTED = 597  # images on which the examples do not train

Printed = dict[str, dict[int, str]]


def run(world_size: int, *program: str) -> Said:
    return torchrun(world_size, *program) if world_size else python(*program)


def run_all(world_size: int, folder: Path) -> Printed:
    """Return the output of each rank of each example."""
    ended = run(world_size, "-m", "tests.example_runner", str(folder), *NAMES)
    trouble = f"did not run: exit status {ended.status}\n{ended.err[-4000:]}"

    def text_of(path: Path) -> str:
        return path.read_text() if path.exists() else trouble

    ranks = range(max(1, world_size))
    return {name: {rank: text_of(folder / f"{name}.{rank}") for rank in ranks} for name in NAMES}


@pytest.fixture
def printed_in(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Printed]:
    """Return a function that gives the output of the ranks of one world."""
    return lambda name: once(
        tmp_path_factory, f"examples-{name}", lambda folder: run_all(WORLDS[name], folder)
    )


@pytest.fixture(params=WORLDS)
def printed(request: pytest.FixtureRequest, printed_in: Callable[[str], Printed]) -> Printed:
    """Return the output of each world."""
    return printed_in(request.param)


@pytest.mark.long
def test_only_the_main_rank_prints_and_all_worlds_print_the_same(
    printed: Printed, printed_in: Callable[[str], Printed]
) -> None:
    alone = printed_in("world0")
    for name, by_rank in printed.items():
        assert by_rank[0], name
        assert set(by_rank.values()) <= {by_rank[0], ""}, by_rank
        assert all(not text for rank, text in by_rank.items() if rank > 0), by_rank
        if name != TIMED:
            assert by_rank[0] == alone[name][0], name


@pytest.mark.long
@pytest.mark.parametrize("world", WORLDS)
def test_the_times_of_both_libraries_are_shown(
    world: str, printed_in: Callable[[str], Printed]
) -> None:
    time = r"\d+\.\d\d ms"
    of_torch = "" if world == "world0" else rf"  torch +{time}"  # it refuses to run alone
    lines = printed_in(world)[TIMED][0].splitlines()
    for line, name in zip(lines, ("settings", "32 MiB of weights"), strict=True):
        assert re.fullmatch(rf" *{name}{of_torch}  objcomm +{time}", line), line


def found(pattern: str, text: str) -> list[float]:
    """Return the numbers that a pattern finds in an example's output."""
    match = re.fullmatch(pattern, text.strip())
    assert match, text
    return [float(each) for each in match.groups()]


_NUMBER = r"(-?\d+(?:\.\d+)?)"


@pytest.mark.long
def test_the_output_of_the_examples_is_true(printed_in: Callable[[str], Printed]) -> None:
    from sklearn.datasets import load_digits  # noqa: PLC0415  # see above

    from examples.best_checkpoint import RATES  # noqa: PLC0415  # see above

    said = {name: by_rank[0] for name, by_rank in printed_in("world0").items()}
    pixels, digits = load_digits(return_X_y=True)

    images, right, loss = found(
        rf"{_NUMBER} images, {_NUMBER} right, mean loss {_NUMBER}", said["ddp_evaluation"]
    )
    assert images == TESTED
    assert right > 0.85 * TESTED
    assert loss < 0.5

    batches, loss = found(
        rf"{_NUMBER} batches, loaded once; rate \S+ ends with loss {_NUMBER}", said["one_loader"]
    )
    assert batches == 5 * 30  # epochs, each of 1200 images in batches of 40
    assert loss < 0.5

    text = load_digits().DESCR
    words, loss = found(rf"{_NUMBER} words known, loss {_NUMBER} of .*", said["fsdp_tokenizer"])
    assert words == len(set(re.findall(r"\w+|[^\w\s]", text)))
    assert loss < 0.5 * math.log(words)

    (epochs,) = found(rf"stopped after {_NUMBER} epochs by digit \d", said["early_stopping"])
    assert 10 < epochs < 1000

    rate, score = found(rf".* of rate {_NUMBER}, score {_NUMBER}", said["best_checkpoint"])
    assert min(RATES) < rate < max(RATES)
    assert -0.5 < score < 0

    rows, pixel, mean, deviation = found(
        rf"{_NUMBER} rows; pixel {_NUMBER} varies most: {_NUMBER} ± {_NUMBER}",
        said["streaming_statistics"],
    )
    assert (rows, pixel) == (len(pixels), pixels.std(axis=0).argmax())
    assert mean == pytest.approx(pixels[:, int(pixel)].mean(), abs=1e-6)
    assert deviation == pytest.approx(pixels[:, int(pixel)].std(), abs=1e-6)

    (images,) = found(rf"all ranks .* saw {_NUMBER} images in 3 epochs", said["uneven_data"])
    assert images == 3 * (len(pixels) - TESTED)

    assert said["request_reply_server"] == "lr: 0.1, warmup: None, layers: (64, 10), seed: 7\n"

    seen, known = pixels[:-TESTED], digits[:-TESTED]
    means = np.stack([seen[known == digit].mean(axis=0) for digit in range(10)])
    distances = ((pixels[-TESTED:, None] - means) ** 2).sum(axis=2)
    wrong = int((distances.argmin(axis=1) != digits[-TESTED:]).sum())
    assert found(rf".* agree: {_NUMBER} of {_NUMBER} .*", said["with_accelerate"]) == [
        wrong,
        TESTED,
    ]
    accuracy, images = found(
        rf"accuracy {_NUMBER} of {_NUMBER} images, both ways", said["with_torchmetrics"]
    )
    assert images == TESTED
    assert accuracy == pytest.approx(1 - wrong / TESTED, abs=1e-6)

    for name in ("with_hf_trainer", "with_lightning_trainer"):
        accuracy, images = found(rf"accuracy {_NUMBER} of {_NUMBER} images", said[name])
        assert images == TESTED
        assert accuracy > 0.8

    loss, wrong_there, _, _, times = found(
        rf"loss {_NUMBER}, {_NUMBER} wrong; {_NUMBER} was {_NUMBER} {_NUMBER} times",
        said["with_fabric"],
    )
    assert loss < 1
    assert times <= wrong_there < 0.15 * TESTED


@pytest.mark.long
def test_survivors_of_a_death_end_with_the_model_of_as_many_ranks() -> None:
    ended = run(0, str(_EXAMPLES / f"{OWN_START}.py"))
    assert ended.status == 0, ended.err
    assert ended.out == "after step 10, as with three ranks: True\n"


@pytest.mark.long
def test_an_example_runs_as_its_first_lines_say() -> None:
    ended = run(3, str(_EXAMPLES / "streaming_statistics.py"))
    assert ended.status == 0, ended.err
    assert ended.out.startswith("1797 rows; ")
    assert ended.out.count("\n") == 1


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short_and_says_how_it_is_run(name: str) -> None:
    lines = (_EXAMPLES / f"{name}.py").read_text().splitlines()
    assert len(lines) < 80
    assert f"    torchrun --nproc-per-node 4 examples/{name}.py" in lines
    assert f"    python examples/{name}.py" in lines
    assert lines[-4:] == [
        'if __name__ == "__main__":',
        '    objcomm.init("gloo")',
        "    main()",
        "    objcomm.shutdown()",
    ]


def shown(notebook: Any) -> list[str]:
    """List the texts that a notebook's cells print and return."""
    outputs = [each for cell in notebook.cells for each in cell.get("outputs", [])]
    return [each["text"] if "text" in each else each["data"]["text/plain"] for each in outputs]


@pytest.mark.long
def test_the_notebook_shows_its_actual_output() -> None:
    import nbclient  # noqa: PLC0415  # see above
    import nbformat  # noqa: PLC0415  # see above
    from traitlets.config import Config  # noqa: PLC0415  # see above

    stored = nbformat.read(_EXAMPLES / "notebook.ipynb", as_version=4)  # type: ignore[no-untyped-call]  # it is untyped
    afresh = nbformat.read(_EXAMPLES / "notebook.ipynb", as_version=4)  # type: ignore[no-untyped-call]  # it is untyped
    # Over TCP Jupyter asks for free ports that its kernel takes only a second later.
    chosen = Config(KernelManager={"transport": "ipc"})
    nbclient.NotebookClient(afresh, timeout=LIMIT_S, kernel_name="python3", config=chosen).execute()
    assert len(shown(stored)) == 3
    assert shown(afresh) == shown(stored)


def test_the_page_shows_every_program() -> None:
    """MkDocs includes a file only if this mark is exact, and otherwise shows the mark as text."""
    page = (_ROOT / "docs" / "examples.md").read_text()
    assert sorted(re.findall(r'^--8<-- "examples/(\w+)\.py"$', page, re.MULTILINE)) == sorted(
        [*NAMES, OWN_START]
    )
