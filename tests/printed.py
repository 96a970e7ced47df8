"""What a process has printed, less what comes and goes with the machine."""

import re

# A name that could not be looked up, by torch; a first use for which a look-up took long, by
# objcomm.
_OF_LOOK_UPS = re.compile(
    r"\[c10d\] The hostname of the client socket cannot be retrieved"
    r"|rank \d+ is in init \(call 0\) .* s and waits: "
)


def without_gloo(printed: str) -> str:
    """What was printed, less what Gloo prints of each connection in a torch as old as 2.8."""
    lines = printed.splitlines(keepends=True)  # lines of two processes may be mixed
    return "".join(line for line in lines if "[Gloo]" not in line and "peer ranks" not in line)


def without_look_ups(printed: str) -> str:
    """What was printed, less what is told where the other end's name is not found at once.

    Torch asks for that for each connection to its store; where a resolver loses the query, that
    takes 1 s in this suite.
    """
    lines = printed.splitlines(keepends=True)
    return "".join(line for line in lines if not _OF_LOOK_UPS.search(line))
