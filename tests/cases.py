"""Many cases in one test on ranks: an exception names the case that raised it."""

import contextlib
from collections.abc import Iterator

__all__ = ["case"]


@contextlib.contextmanager
def case(*names: object) -> Iterator[None]:
    """Add the case to any exception that the block raises."""
    try:
        yield
    except BaseException as error:  # pytest's own do not derive from Exception
        error.add_note(f"in the case {', '.join(map(str, names))}")
        raise
