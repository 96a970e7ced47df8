"""Comparison of the program lines on which two ranks make the same call.

If the lines differ, one rank may have made an extra call, and values that do not belong together
would be paired silently, because operation, sequence number and root agree.
"""

import ast
import linecache
from collections.abc import Iterator, Sequence

from objcomm._observe.log import log
from objcomm._wire.header import Header
from objcomm.errors import OTHER_LINES, DesyncError

# A program has few pairs of lines, but they come from other ranks, so memory must be bounded.
_PAIRS_MAX = 1000

_known: set[frozenset[str]] = set()

_LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break)


def check_lines(mine: Header, theirs: Header, group: str, *, must_agree: bool) -> None:
    """Compare the line of another rank's call with this rank's; log each new pair once.

    Lines are the same if file name and line number are: two ranks may run from different folders,
    and a header contains only the end of a long path.

    Nothing is logged if the root makes its call in one branch of an ``if`` and another rank in the
    other branch: many programs are written that way. In calls without a root there is no reason to
    do so.

    Args:
        mine: the header of this rank's call.
        theirs: the header of the other rank's call.
        group: the group's name, for the log.
        must_agree: whether different lines are an error.

    Raises:
        DesyncError: the lines differ, and must agree.
    """
    ours, other = _short(mine.call_site), _short(theirs.call_site)
    if ours == other:
        return
    if must_agree:
        raise DesyncError(OTHER_LINES, (mine.position, theirs.position))
    pair = frozenset((ours, other))
    if pair in _known or len(_known) >= _PAIRS_MAX:
        return
    _known.add(pair)
    if mine.root in (mine.sender, theirs.sender) and _are_branches(mine.call_site, other):
        return
    log.warning(
        "%s, but %s: values that do not belong together may have been paired. If the two lines "
        "belong together, give both calls the same name=; if not, find out which rank makes an "
        "extra call. objcomm.configure(check='lines') makes this a DesyncError. This pair of lines "
        "is logged once.",
        *sorted((mine.position, theirs.position)),
        extra={"group": group},
    )


def _short(call_site: str) -> str:
    return call_site.rpartition("/")[2]


def _are_branches(mine: str, theirs: str) -> bool:
    """Whether two lines of one file are in different branches of the same ``if``."""
    path, _, line = mine.rpartition(":")
    file, _, other = theirs.rpartition(":")
    if file != _short(path) or not (line.isdecimal() and other.isdecimal()):
        return False
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(
        {_branch_of(int(each), branches) for each in (line, other)} == {0, 1}
        for branches in _branches_in(tree)
    )


def _branches_in(
    tree: ast.AST,
) -> Iterator[tuple[Sequence[ast.stmt | ast.expr], Sequence[ast.stmt | ast.expr]]]:
    """Yield both branches of each ``if``; code after a branch that leaves counts as ``else``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp):
            yield [node.body], [node.orelse]
        for name in ("body", "orelse", "finalbody"):
            found = getattr(node, name, None)
            block = found if isinstance(found, list) else []
            for at, each in enumerate(block):
                if isinstance(each, ast.If):
                    is_last = isinstance(each.body[-1], _LEAVING)
                    yield each.body, each.orelse + (block[at + 1 :] if is_last else [])


def _branch_of(line: int, branches: Sequence[Sequence[ast.stmt | ast.expr]]) -> int:
    """Return the index of the branch that contains a line; -1 if there is none."""
    for number, nodes in enumerate(branches):
        if any(each.lineno <= line <= (each.end_lineno or 0) for each in nodes):
            return number
    return -1
