"""Many cases in one test on ranks: whatever one of them raises says which it was."""

import contextlib
from collections.abc import Iterator

__all__ = ["case"]


@contextlib.contextmanager
def case(*names: object) -> Iterator[None]:
    """Note the case in what the block raises."""
    try:
        yield
    except BaseException as error:  # pytest's own are no Exceptions
        error.add_note(f"in the case {', '.join(map(str, names))}")
        raise
