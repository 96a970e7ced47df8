"""Use accelerate and objcomm side by side, on the same ranks.

accelerate deals full batches, so it repeats some images and later drops the duplicates of the last
batch; it sends objects with torch's object collectives. objcomm deals each image once, and sends
any object. Within `patch()`, accelerate's own calls go through objcomm without changes.

    torchrun --nproc-per-node 4 examples/with_accelerate.py
    python examples/with_accelerate.py
"""

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import objcomm
from objcomm.compat.torch import patch

TRAINED = 1200


def nearest(images: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    """Return, for each image, the digit whose mean image is nearest."""
    return torch.cdist(images, means).argmin(dim=1)


def main() -> None:
    """Share settings, evaluate, and gather texts, each with both libraries."""
    accelerator = Accelerator(cpu=True)
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels), torch.tensor(digits)
    means = torch.stack([images[:TRAINED][labels[:TRAINED] == d].mean(dim=0) for d in range(10)])
    test = TensorDataset(images[TRAINED:], labels[TRAINED:])

    # Share one rank's settings.
    settings = {"names": ("zero", "one"), "limit": 2**70} if accelerator.is_main_process else None
    (theirs,) = broadcast_object_list([settings])
    assert objcomm.broadcast(settings) == theirs

    # Gather all predictions, in dataset order.
    answers = []
    for batch, truth in accelerator.prepare(DataLoader(test, batch_size=25)):
        answers.append(accelerator.gather_for_metrics((nearest(batch, means), truth)))
    theirs, truth = (torch.cat(column) for column in zip(*answers, strict=True))

    rows = torch.arange(len(test))[objcomm.rank() :: objcomm.world_size()]
    parts = objcomm.all_gather((rows, nearest(test.tensors[0][rows], means)))
    ours = torch.empty_like(theirs)
    for asked, answered in parts:
        ours[asked] = answered
    assert torch.equal(ours, theirs)
    assert torch.equal(truth, test.tensors[1])

    # Gather texts, whose number differs between ranks; accelerate concatenates the ranks' lists.
    wrong = [f"image {row}" for row in rows.tolist() if ours[row] != truth[row]]
    collected = objcomm.all_reduce(wrong, "concat")
    assert gather_object(wrong) == collected
    with patch():  # accelerate's same call now uses objcomm
        assert gather_object(wrong) == collected

    if objcomm.is_main():
        print(f"accelerate and objcomm agree: {len(collected)} of {len(truth)} images wrong")


if __name__ == "__main__":
    objcomm.init("gloo")
    main()
    objcomm.shutdown()
