"""Shard a model with FSDP whose size depends on a tokenizer that rank 0 builds.

The tokenizer is built once and sent to every rank. If each rank built its own, they might differ,
and so might the shards. At the end rank 0 gathers all shards and runs the whole model.

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
    """Splits texts into words and numbers them."""

    pattern: re.Pattern[str]
    numbers: dict[str, int]

    def encode(self, text: str) -> torch.Tensor:
        """Return the numbers of the words."""
        return torch.tensor([self.numbers[word] for word in self.pattern.findall(text)])


def build(text: str) -> Tokenizer:
    """Build a tokenizer that knows all words of a text."""
    pattern = re.compile(r"\w+|[^\w\s]")
    words = sorted(set(pattern.findall(text)))
    return Tokenizer(pattern, dict(zip(words, range(len(words)), strict=True)))


def bigram_model(words: int) -> nn.Module:
    """Create a model that predicts the next word from one word."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(words, 16), nn.Tanh(), nn.Linear(16, words)).double()


def train(model: nn.Module, words: torch.Tensor) -> None:
    """Take twenty steps, in which each rank trains on its part of the word pairs."""
    mine = words.unfold(0, 2, 1)[objcomm.rank() :: objcomm.world_size()]
    share = objcomm.world_size() / len(words)  # FSDP averages over ranks
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(mine[:, 0]), mine[:, 1], reduction="sum")
        (loss * share).backward()
        optimizer.step()


def main() -> None:
    """Share the tokenizer, train the sharded model, and gather it."""
    text = load_digits().DESCR
    tokenizer = objcomm.run_on_main(build, args=[text])
    words = tokenizer.encode(text)
    model = bigram_model(len(tokenizer.numbers))
    if objcomm.is_initialized():  # not if this runs alone
        fully_shard(model)
    train(model, words)
    state = model.state_dict().items()
    shards = {name: w.to_local() if isinstance(w, DTensor) else w for name, w in state}
    if parts := objcomm.gather(shards):  # sizes differ between ranks
        whole = bigram_model(len(tokenizer.numbers))
        whole.load_state_dict({name: torch.cat([part[name] for part in parts]) for name in shards})
        loss = nn.functional.cross_entropy(whole(words[:-1]), words[1:])
        print(f"{len(tokenizer.numbers)} words known, loss {loss:.6f} of the whole model")


if __name__ == "__main__":
    objcomm.init("gloo")
    main()
    objcomm.shutdown()
