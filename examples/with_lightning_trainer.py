"""Lightning's Trainer trains and validates; objcomm deals the images and adds up the answers.

Lightning's own sampler deals some images twice, so that all ranks take equally many steps. Here
each is validated once, so that ranks have different numbers of them and the accuracy is exact.

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

TRAINED, BATCH_SIZE = 1200, 24  # images; of all ranks together


class Digits(LightningModule):
    """A linear model, and how often this rank has taken which digit for which."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10, dtype=torch.float64)
        self.answers: collections.Counter[tuple[int, int]] = collections.Counter()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Choose plain gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """Compute the loss."""
        return nn.functional.cross_entropy(self.linear(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        """Count; some ranks take a step more, so there is no collective in here."""
        answers = self.linear(batch[0]).argmax(dim=1)
        self.answers.update(zip(batch[1].tolist(), answers.tolist(), strict=True))

    def on_validation_epoch_end(self) -> None:
        """Add up the counts of all ranks; each logs the same accuracy, with no sync_dist=True."""
        counts = objcomm.all_reduce(self.answers, "counter")
        self.answers.clear()
        right = sum(times for (digit, answer), times in counts.items() if digit == answer)
        self.log("accuracy", right / counts.total())


def main() -> None:
    """Train, validating after each epoch, and show the last accuracy."""
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
