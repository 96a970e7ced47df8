"""The demo, end to end on two ranks, against a single-process evaluation of its predictions."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from objcomm.demo.config import SAMPLE, ConfigError, read_config
from tests.doctor.job import Said
from tests.once import once
from tests.printed import without_look_ups
from tests.under_run import python

# scikit-learn is imported only where it is used: that takes seconds, and pytest reads this file
# even if none of it runs.

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"

Columns = dict[str, NDArray[np.int64]]


@dataclass(frozen=True)
class Run:
    """How the demo's command ended, and the folder of its results."""

    said: Said
    out: Path

    @property
    def results(self) -> dict[str, Any]:
        """Return the results that it wrote for programs."""
        loaded: dict[str, Any] = json.loads((self.out / "results.json").read_text())
        return loaded


def _run_demo(config: Path, out: Path) -> Run:
    return Run(python("-m", "objcomm.demo", f"--config={config}", "--nproc=2", f"--out={out}"), out)


@pytest.fixture
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run the demo with the sample config."""
    run = once(tmp_path_factory, "demo", lambda folder: _run_demo(SAMPLE, folder / "out"))
    assert run.said.status == 0, run.said.err
    return run


@pytest.fixture
def predictions(finished: Run) -> Columns:
    """Return the gathered predictions, as columns."""
    with np.load(finished.out / "predictions.npz") as columns:
        return dict(columns)


@pytest.mark.long
def test_the_matrix_is_that_of_a_single_process(finished: Run, predictions: Columns) -> None:
    from sklearn.metrics import confusion_matrix  # noqa: PLC0415  # see above

    from objcomm.demo.learning import CLASSES  # noqa: PLC0415  # see above

    expected = confusion_matrix(predictions["truth"], predictions["answer"], labels=range(CLASSES))
    assert finished.results["confusion_matrix"] == expected.tolist()


@pytest.mark.long
def test_the_predictions_are_of_the_whole_test_set_once(predictions: Columns) -> None:
    from sklearn.datasets import load_digits  # noqa: PLC0415  # see above

    from objcomm.demo.learning import load_shards  # noqa: PLC0415  # see above

    config = read_config(SAMPLE)
    _, test = load_shards(0, 1, test_share=config.test_share, seed=config.seed)
    assert sorted(predictions["row"]) == sorted(test.rows)
    assert (predictions["truth"] == load_digits().target[predictions["row"]]).all()


@pytest.mark.long
def test_the_table_shows_the_accuracy_of_each_rank_and_of_all(
    finished: Run, predictions: Columns
) -> None:
    lines = [line.split() for line in finished.said.out.splitlines()]
    right = predictions["truth"] == predictions["answer"]
    for rank in (0, 1):
        mine = right[predictions["rank"] == rank]
        assert ["rank", str(rank), str(len(mine)), str(mine.sum()), f"{mine.mean():.1%}"] in lines
    assert ["all", str(len(right)), str(right.sum()), f"{right.mean():.1%}"] in lines


@pytest.mark.long
def test_the_model_has_learned(finished: Run) -> None:
    assert finished.results["accuracy"]["all"] > 0.9


@pytest.mark.long
def test_the_table_shows_bytes_and_time_of_every_call(finished: Run) -> None:
    calls = {call["operation"]: call for call in finished.results["calls"]}
    assert {"reduce_and_broadcast", "broadcast", "gather", "reduce"} <= calls.keys()
    for operation, call in calls.items():
        assert call["sent_nbytes"] > 0
        assert call["milliseconds"] > 0
        shown = f"{call['sent_nbytes']:,}   {call['milliseconds']:.2f}".split()
        assert [operation, str(call["calls"]), *shown] in [
            line.split() for line in finished.said.out.splitlines()
        ]


@pytest.mark.long
def test_rank_0_alone_shows_progress(finished: Run) -> None:
    assert "training on 2 ranks: 100%" in finished.said.err
    assert len(re.findall(r"\| 0/\d+ \[", finished.said.err)) == 1  # a single progress bar starts


@pytest.mark.long
def test_the_picture_is_a_png(finished: Run) -> None:
    assert (finished.out / "confusion.png").read_bytes().startswith(_PNG_SIGNATURE)


@pytest.mark.long
def test_the_picture_shows_the_counts() -> None:
    from objcomm.demo import job  # noqa: PLC0415  # see above
    from objcomm.demo.learning import ConfusionMatrix, Predictions  # noqa: PLC0415  # see above

    truth, answers = np.array([0, 0, 3]), np.array([0, 8, 3])
    matrix = ConfusionMatrix.of(Predictions(0, np.arange(3), truth, answers))
    (axes,) = job.draw(matrix).axes
    shown = {text.get_position(): text.get_text() for text in axes.texts}
    assert shown == {(0, 0): "1", (8, 0): "1", (3, 3): "1"}
    assert axes.get_title() == "2 of 3 digits right"


@pytest.mark.long
def test_test_shards_are_the_whole_test_set_and_training_shards_are_equal() -> None:
    from objcomm.demo.learning import load_shards  # noqa: PLC0415  # see above

    shards = [load_shards(rank, 4, test_share=0.3, seed=1) for rank in range(4)]
    assert len({len(train.rows) for train, _ in shards}) == 1
    rows = np.concatenate([part.rows for shard in shards for part in shard])
    assert len(rows) == len(set(rows))
    assert sum(len(test.rows) for _, test in shards) == round(0.3 * 1797)


BROKEN = {
    "not TOML": "epochs = = 3",
    "it lacks": "epochs = 3",
    "there is no setting epoch": SAMPLE.read_text().replace("epochs", "epoch") + "epochs = 1",
    "epochs must be of type int": SAMPLE.read_text().replace("epochs = 12", "epochs = '12'"),
    "hidden must be positive": SAMPLE.read_text().replace("hidden = 48", "hidden = 0"),
}


@pytest.mark.parametrize("reason", BROKEN)
def test_a_malformed_config_is_refused_with_its_reason(reason: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text(BROKEN[reason])
    with pytest.raises(ConfigError, match=reason):
        read_config(path)


@pytest.mark.long
@pytest.mark.parametrize(
    "content",
    [pytest.param(None, id="missing"), pytest.param("epochs = = 3", id="malformed")],
)
def test_an_unusable_config_ends_all_ranks_with_one_message(
    content: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "mine.toml"
    if content is not None:
        path.write_text(content)
    run = _run_demo(path, tmp_path / "out")
    assert (run.said.status, run.said.out) == (2, ""), run.said.err
    (line,) = without_look_ups(run.said.err).splitlines()
    assert line.startswith(f"objcomm.demo: cannot use the config {str(path)!r}: ")
    assert not run.out.exists()


def test_all_missing_packages_are_named_at_once_as_pip_knows_them() -> None:
    program = "import sys; sys.modules.update(sklearn=None, tqdm=None); import objcomm.demo"
    ended = python("-c", program)
    assert ended.status == 1
    assert ended.err.splitlines()[-1].endswith(
        "MissingDependencyError: 'sklearn' is not installed; run: pip install scikit-learn tqdm"
    )
