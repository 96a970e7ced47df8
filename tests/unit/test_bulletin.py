"""The thread that talks to the store, when its world ends."""

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import torch.distributed as dist

from objcomm.transport.bulletin import Bulletin
from tests.waits import PATIENCE_S


class Held:
    """Something that can be watched."""


def test_what_is_to_be_told_when_the_world_ends_is_told_or_let_go(tmp_path: Path) -> None:
    worlds = ["alive"]
    store = dist.FileStore(str(tmp_path / "store"), 1)
    answer: Any = None
    bulletin = Bulletin(
        store, 0, 1, describe=answer, is_alive=lambda: bool(worlds), is_cut_off=lambda _: False
    )
    may_end = threading.Event()
    done: list[Any] = []
    bulletin.submit(lambda _: done.append(may_end.wait()))
    bulletin.submit(lambda _: done.append("told"))
    worlds.clear()
    may_end.set()
    bulletin.close(PATIENCE_S, "its program has ended")
    assert done == [True, "told"]
    held = Held()
    watched = weakref.ref(held)
    bulletin.submit(lambda _, held=held: done.append(held))  # type: ignore[misc]  # a default
    del held
    gc.collect()
    assert watched() is None
    assert done == [True, "told"]
