"""Shard a model by FSDP whose size comes from a tokenizer that rank 0 alone has built.

The tokenizer is built once and given to every rank; built by each for itself, it might differ, and
so might the shards. At the end rank 0 gets the shards of all and runs the whole model.

    torchrun --nproc-per-node 4 examples/fsdp_tokenizer.py
    python examples/fsdp_tokenizer.py
"""

import re
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import objcomm


class Tokenizer(NamedTuple):
    """Splits texts into words, and numbers them."""

    pattern: re.Pattern[str]
    numbers: dict[str, int]

    def encode(self, text: str) -> torch.Tensor:
        """The words' numbers."""
        return torch.tensor([self.numbers[word] for word in self.pattern.findall(text)])


def build(text: str) -> Tokenizer:
    """A tokenizer that knows all words of a text."""
    pattern = re.compile(r"\w+|[^\w\s]")
    words = sorted(set(pattern.findall(text)))
    return Tokenizer(pattern, dict(zip(words, range(len(words)), strict=True)))


def bigram_model(words: int) -> nn.Module:
    """Predicts the next word from one word."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(words, 16), nn.Tanh(), nn.Linear(16, words)).double()


def train(model: nn.Module, words: torch.Tensor) -> None:
    """Take twenty steps; each rank has its part of the pairs of words."""
    mine = words.unfold(0, 2, 1)[objcomm.rank() :: objcomm.world_size()]
    share = objcomm.world_size() / len(words)  # FSDP takes the mean over ranks
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(mine[:, 0]), mine[:, 1], reduction="sum")
        (loss * share).backward()
        optimizer.step()


def main() -> None:
    """Share, train in shards, gather."""
    text = load_digits().DESCR
    tokenizer = objcomm.run_on_main(build, args=[text])
    words = tokenizer.encode(text)
    model = bigram_model(len(tokenizer.numbers))
    if objcomm.is_initialized():  # it is not where this runs alone
        fully_shard(model)
    train(model, words)
    state = model.state_dict().items()
    shards = {name: w.to_local() if isinstance(w, DTensor) else w for name, w in state}
    if parts := objcomm.gather(shards):  # of other sizes on other ranks
        whole = bigram_model(len(tokenizer.numbers))
        whole.load_state_dict({name: torch.cat([part[name] for part in parts]) for name in shards})
        loss = nn.functional.cross_entropy(whole(words[:-1]), words[1:])
        print(f"{len(tokenizer.numbers)} words known, loss {loss:.6f} of the whole model")


if __name__ == "__main__":
    objcomm.init("gloo")
    main()
    objcomm.shutdown()
