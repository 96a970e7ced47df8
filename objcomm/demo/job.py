"""What each rank does; ``python -m objcomm.demo`` starts the ranks. Read ``run`` first.

Every objcomm call of the demo stands here in the order in which the ranks make it, but for one:
``training`` shares the first weights.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import objcomm
from objcomm.demo.config import REFUSED, Config, read_config
from objcomm.demo.digits import load_shards
from objcomm.demo.evaluation import ConfusionMatrix, predict
from objcomm.demo.training import train

_PATIENCE_SECONDS = 60.0


def run(config: Config, out: Path) -> None:
    """Train together, evaluate apart, report on rank 0."""
    rank, world_size = objcomm.rank(), objcomm.world_size()
    train_shard, test_shard = load_shards(
        rank, world_size, test_share=config.test_share, seed=config.seed
    )
    model = train(config, train_shard)

    predictions = predict(model, test_shard, rank)
    gathered = objcomm.gather(predictions, progress=True)
    matrix = objcomm.reduce(ConfusionMatrix.of(predictions), ConfusionMatrix.merge)
    calls = objcomm.gather(objcomm.stats())

    if gathered is not None and matrix is not None and calls is not None:  # so on rank 0
        # Imported here, because matplotlib would cost every other rank half a second.
        from objcomm.demo import report  # noqa: PLC0415

        results = report.Results(config, gathered, matrix, calls)
        report.write(results, out)
        print(report.table(results))
        print(f"Written to {out}: {', '.join(report.FILES)}")


def share_config(path: Path) -> Config:
    """Read the config on rank 0 and give it to every rank.

    Not ``broadcast(read_config(path))``: if reading raised, rank 0 would never come to the call
    that the others wait in. What a callback raises is raised on every rank.

    Raises:
        CollectiveError: rank 0 cannot use the file. Every rank.
    """
    return objcomm.reduce_and_broadcast(lambda: None, lambda _: read_config(path))


def refuse(error: objcomm.CollectiveError) -> int:
    """Let rank 0 say why there is no config; return every rank's exit status."""
    if objcomm.is_main():
        print(f"objcomm.demo: {error.failures[0].message}", file=sys.stderr, flush=True)
    # torchrun, which may start this module too, ends every rank as soon as one has failed, so none
    # may leave before rank 0 has spoken. After a failure the group still works.
    objcomm.barrier("rank 0 has spoken")
    return REFUSED


def main(argv: Sequence[str] | None = None) -> int:
    """Run this rank's part; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="torchrun -m objcomm.demo.job", description="One rank of objcomm's demo."
    )
    parser.add_argument("--config", type=Path, required=True, help="a TOML file, read on rank 0")
    parser.add_argument("--out", type=Path, required=True, help="a folder, written on rank 0")
    arguments = parser.parse_args(argv)
    objcomm.init("gloo", timeout=_PATIENCE_SECONDS)
    try:
        try:
            config = share_config(arguments.config)
        except objcomm.CollectiveError as error:
            return refuse(error)
        run(config, arguments.out)
    finally:
        objcomm.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
