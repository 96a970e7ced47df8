"""What a process has printed, without lines that depend on the machine."""

import re

# torch reports a name that it could not resolve; objcomm reports a first use in which name
# resolution was slow.
_OF_LOOK_UPS = re.compile(
    r"\[c10d\] The hostname of the client socket cannot be retrieved"
    r"|rank \d+ is in init \(call 0\) .* s and waits: "
)


def without_gloo(printed: str) -> str:
    """Return the text without what Gloo prints for each connection in torch 2.8."""
    lines = printed.splitlines(keepends=True)  # lines of two processes may be mixed
    return "".join(line for line in lines if "[Gloo]" not in line and "peer ranks" not in line)


def without_look_ups(printed: str) -> str:
    """Return the text without what is printed if the peer's name can't be resolved immediately.

    torch resolves it for each connection to its store; if the resolver loses the query, that takes
    1 s in this suite.
    """
    lines = printed.splitlines(keepends=True)
    return "".join(line for line in lines if not _OF_LOOK_UPS.search(line))
