"""One instance of every error class, and what its text must contain."""

from objcomm import errors
from objcomm.errors import Position, RankFailure

SIDE = Position(rank=0, operation="broadcast", sequence=3, root=1, call_site="train.py:10")
OTHER = Position(rank=1, operation="gather", sequence=3, root=-1, call_site="é.py:2")
FAILED = RankFailure(
    2, "builtins.ValueError", "no \N{GRINNING FACE}", "Traceback …\nValueError: no"
)
EXAMPLES: dict[type[BaseException], tuple[errors.ObjcommError, list[str]]] = {
    type(error): (error, words)
    for error, words in (
        (errors.ObjcommError("text"), ["text"]),
        (errors.UsageError("give one root"), ["give one root"]),
        (errors.NotInGroupError("rank 0 is outside"), ["rank 0 is outside"]),
        (
            errors.MissingDependencyError("sklearn", "scikit-learn"),
            ["'sklearn'", "install scikit-learn"],
        ),
        (errors.CodecError("text"), ["text"]),
        (
            errors.EncodeError("pickle", "lock", "obj['cb']", "why"),
            ["pickle", "lock", "obj['cb']", "why"],
        ),
        (
            errors.sent_at(errors.DecodeError("pickle", "why", "models.net:Head"), OTHER),
            ["pickle", "why", "rank 1 gave to gather at é.py:2", "'Head'", "version of 'models'"],
        ),
        (errors.ForbiddenTypeError("msgpack", "class 'a.B'"), ["msgpack", "a.B"]),
        (errors.WireError("text"), ["text"]),
        (errors.AuthenticationError("not signed"), ["not signed"]),
        (
            errors.DesyncError("different operations", (SIDE, OTHER)),
            ["rank 0", "broadcast", "train.py:10", "rank 1", "gather", "é.py:2", "3"],
        ),
        (errors.TransportError("gather", (1,), "closed"), ["gather", "rank 1", "closed"]),
        (
            errors.TransportTimeout("barrier", (1, 3), 2.5, (SIDE,), (3,), *[True]),
            [
                *("barrier", "1, 3", "2.5 s", "timeout=", "rank 0 is in broadcast (call 3)"),
                *("train.py:10", "rank 3: no answer", "store: no answer"),
            ],
        ),
        (errors.BrokenGroupError("gather", "rank 1 died"), ["gather", "rank 1 died"]),
        (
            errors.StartError(1, 2, "node003:29500", "no answer", (0,)),
            ["rank 1 of 2", "node003:29500", "no answer", "MASTER_ADDR", "MASTER_PORT"],
        ),
        (
            errors.LaunchError("train", {2: FAILED, 0: RankFailure(0, "KeyError", "x", "Tr 0")}),
            ["train", "rank 2", "ValueError", "Traceback …", "rank 0: KeyError: x", "Tr 0"],
        ),
        (
            errors.CollectiveError("gather", {2: FAILED}),
            ["gather", "rank 2", "ValueError", "no \N{GRINNING FACE}", "Traceback …"],
        ),
    )
}
