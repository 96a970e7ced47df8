"""Replace torch's `broadcast_object_list` with `objcomm.broadcast`, and time both.

`before` shares an object with torch, `after` with objcomm. Both must return the same object on
every rank. Without a launcher, torch's function raises; objcomm's works without a special case.

    torchrun --nproc-per-node 4 examples/replace_broadcast_object_list.py
    python examples/replace_broadcast_object_list.py
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch.distributed as dist

import objcomm

Share = Callable[[Any], Any]


def before(obj: Any) -> Any:
    """Share rank 0's object with torch."""
    box = [obj]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def after(obj: Any) -> Any:
    """Share rank 0's object with objcomm."""
    return objcomm.broadcast(obj, src=0)


def milliseconds(share: Share, obj: Any, times: int) -> float:
    """Return the median time until the slowest rank has the object."""
    seconds = []
    for _ in range(times):
        objcomm.barrier()
        began = time.perf_counter()
        share(obj)
        seconds.append(time.perf_counter() - began)
    return 1000 * statistics.median(objcomm.all_reduce(seconds, "max"))


def main() -> None:
    """Time both with a small and a large object."""
    payloads = {
        "settings": {"lr": 0.1, "layers": (64, 10), "names": [f"class {n}" for n in range(20)]},
        "32 MiB of weights": {"w": np.ones(2**22), "step": 100},
    }
    shares: dict[str, Share] = {"torch": before, "objcomm": after}
    if not objcomm.is_initialized():  # torch's function would raise
        del shares["torch"]
    for name, payload in payloads.items():
        mine = payload if objcomm.is_main() else None
        line = f"{name:>20}"
        for library, share in shares.items():
            np.testing.assert_equal(share(mine), payload)
            line += f"  {library} {milliseconds(share, mine, times=11):8.2f} ms"
        if objcomm.is_main():
            print(line)


if __name__ == "__main__":
    objcomm.init("gloo")
    main()
    objcomm.shutdown()
