"""Text for whoever sits at a terminal: as it may be shown there, and until nobody reads on."""

import os
import sys


def printable(text: str) -> str:
    """Without what would move a terminal's cursor or change its colours."""
    return "".join(each if each.isprintable() else " " for each in text)


def show(text: str) -> None:
    """Print a report; that its reader has gone is no error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
