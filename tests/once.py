"""Create what several tests use only once, in however many processes pytest runs them."""

import fcntl
import os
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

__all__ = ["once"]

T = TypeVar("T")


def once(folders: pytest.TempPathFactory, name: str, make: Callable[[Path], T]) -> T:
    """Return the value of ``make``, called by the first test that asks; the others wait for it.

    Args:
        folders: the fixture ``tmp_path_factory``.
        name: a name for the value, unique in the whole suite.
        make: gets a new folder that stays; its value must pickle. If it fails, it is not called
            again, and each test that asks fails.
    """
    base = folders.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # shared by all processes of one run
    made = base / f"{name}.pickle"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            folder = base / name
            folder.mkdir(exist_ok=True)
            made.write_bytes(pickle.dumps(_outcome(make, folder)))
    value, why = pickle.loads(made.read_bytes())  # noqa: S301  # our own
    if why:
        pytest.fail(why, pytrace=False)
    found: T = value
    return found


def _outcome(make: Callable[[Path], T], folder: Path) -> tuple[T | None, str]:
    try:
        return make(folder), ""
    except pytest.fail.Exception as failure:
        return None, str(failure)
    except Exception:  # noqa: BLE001  # this failure is why the tests fail
        return None, traceback.format_exc()
