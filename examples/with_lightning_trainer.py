"""Train and validate with Lightning's Trainer; objcomm splits the data and counts the answers.

Lightning's own sampler repeats some images so that all ranks take the same number of steps. Here
each image is validated once, so ranks have different numbers of images, and the accuracy is exact.

    torchrun --nproc-per-node 4 examples/with_lightning_trainer.py
    python examples/with_lightning_trainer.py
"""

import collections

import torch
from pytorch_lightning import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import objcomm

TRAINED, BATCH_SIZE = 1200, 24  # images on all ranks together


class Digits(LightningModule):
    """A linear model, and its counts of true digits and answers on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10, dtype=torch.float64)
        self.answers: collections.Counter[tuple[int, int]] = collections.Counter()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Use plain gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """Compute the loss."""
        return nn.functional.cross_entropy(self.linear(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        """Count the answers, without collectives because ranks may differ in their steps."""
        answers = self.linear(batch[0]).argmax(dim=1)
        self.answers.update(zip(batch[1].tolist(), answers.tolist(), strict=True))

    def on_validation_epoch_end(self) -> None:
        """Add up the counts of all ranks; all log the same accuracy without sync_dist=True."""
        counts = objcomm.all_reduce(self.answers, "counter")
        self.answers.clear()
        right = sum(times for (digit, answer), times in counts.items() if digit == answer)
        self.log("accuracy", right / counts.total())


def main() -> None:
    """Train, validate after each epoch, and print the last accuracy."""
    torch.manual_seed(0)
    pixels, digits = load_digits(return_X_y=True)
    rows = TensorDataset(torch.tensor(pixels / 16), torch.tensor(digits))
    training, test = TensorDataset(*rows[:TRAINED]), TensorDataset(*rows[TRAINED:])
    ranks = objcomm.world_size()
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_epochs=3,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = objcomm.loader(training, batch_size=BATCH_SIZE // ranks, shuffle=True)
    trainer.fit(Digits(), loader, objcomm.loader(test, batch_size=BATCH_SIZE))
    if objcomm.is_main():
        print(f"accuracy {trainer.callback_metrics['accuracy']:.6f} of {len(test)} images")


if __name__ == "__main__":
    objcomm.init("gloo")
    main()
    objcomm.shutdown()
