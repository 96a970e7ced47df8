"""The public names of ``objcomm``, which it imports from here when the first one is used.

So ``import objcomm`` alone does not import torch, and ``python -m objcomm --help`` does not wait
for it.
"""

import gc

# Importing torch creates so many objects that a full garbage collection is almost due. It would run
# during this import, take longer than the import, and free nothing.
_was_collecting = gc.isenabled()
gc.disable()
try:
    from objcomm import codecs, errors, exporters, metrics, models, recorder
    from objcomm._bootstrap.init import Start, init, shutdown
    from objcomm._bootstrap.launch import launch
    from objcomm._calls.group import is_main, lane
    from objcomm._calls.work import Envelope, Work, as_completed, wait_all
    from objcomm._codecs.types import register
    from objcomm._collectives.agree import agree, all_ranks, any_rank, shared_seed
    from objcomm._collectives.broadcast import barrier, broadcast
    from objcomm._collectives.fail_together import fail_together
    from objcomm._collectives.gather import all_gather, gather
    from objcomm._collectives.reduction.operators import Op
    from objcomm._collectives.reduction.reduce import all_reduce, exscan, reduce, scan
    from objcomm._collectives.scatter import all_to_all, reduce_scatter, scatter
    from objcomm._collectives.split import dup, leaders, new_group, node_group, split
    from objcomm._collectives.survivors import survivors
    from objcomm._config import check, configure
    from objcomm._failures.activity import Activity, RankActivity, monitor
    from objcomm._observe.history import OperationStats
    from objcomm._observe.published import publish
    from objcomm._observe.stats import reset_stats, stats
    from objcomm._p2p.messages import (
        Message,
        improbe,
        iprobe,
        irecv,
        isend,
        issend,
        mprobe,
        probe,
        recv,
        send,
        sendrecv,
        ssend,
    )
    from objcomm._training.files import broadcast_file
    from objcomm._training.loader import Shard, loader
    from objcomm._training.metrics import (
        gather_scalar,
        reduce_and_broadcast,
    )
    from objcomm._training.once import (
        compute_and_broadcast,
        ddp_broadcast,
        main_first,
        main_process_only,
        node_first,
        once_per_node,
        rank_prefixed_message,
        run_on_main,
        run_once_per_node,
    )
    from objcomm._training.stream import Stream, stream
    from objcomm._wire.as_tensor import from_tensor, to_tensor
    from objcomm._world import is_initialized, rank, world_size
    from objcomm.errors import (
        AuthenticationError,
        BrokenGroupError,
        CodecError,
        CollectiveError,
        DecodeError,
        DesyncError,
        EncodeError,
        ForbiddenTypeError,
        LaunchError,
        MissingDependencyError,
        NotInGroupError,
        ObjcommError,
        Position,
        RankFailure,
        StartError,
        TransportError,
        TransportTimeout,
        UsageError,
        WireError,
    )
finally:
    if _was_collecting:
        gc.enable()

__all__ = [
    "Activity",
    "AuthenticationError",
    "BrokenGroupError",
    "CodecError",
    "CollectiveError",
    "DecodeError",
    "DesyncError",
    "EncodeError",
    "Envelope",
    "ForbiddenTypeError",
    "LaunchError",
    "Message",
    "MissingDependencyError",
    "NotInGroupError",
    "ObjcommError",
    "Op",
    "OperationStats",
    "Position",
    "RankActivity",
    "RankFailure",
    "Shard",
    "Start",
    "StartError",
    "Stream",
    "TransportError",
    "TransportTimeout",
    "UsageError",
    "WireError",
    "Work",
    "agree",
    "all_gather",
    "all_ranks",
    "all_reduce",
    "all_to_all",
    "any_rank",
    "as_completed",
    "barrier",
    "broadcast",
    "broadcast_file",
    "check",
    "codecs",
    "compute_and_broadcast",
    "configure",
    "ddp_broadcast",
    "dup",
    "errors",
    "exporters",
    "exscan",
    "fail_together",
    "from_tensor",
    "gather",
    "gather_scalar",
    "improbe",
    "init",
    "iprobe",
    "irecv",
    "is_initialized",
    "is_main",
    "isend",
    "issend",
    "lane",
    "launch",
    "leaders",
    "loader",
    "main_first",
    "main_process_only",
    "metrics",
    "models",
    "monitor",
    "mprobe",
    "new_group",
    "node_first",
    "node_group",
    "once_per_node",
    "probe",
    "rank",
    "rank_prefixed_message",
    "recorder",
    "recv",
    "reduce",
    "reduce_and_broadcast",
    "reduce_scatter",
    "register",
    "reset_stats",
    "run_on_main",
    "run_once_per_node",
    "scan",
    "scatter",
    "send",
    "sendrecv",
    "shared_seed",
    "shutdown",
    "split",
    "ssend",
    "stats",
    "stream",
    "survivors",
    "to_tensor",
    "wait_all",
    "world_size",
]

globals().update(publish("objcomm", {name: globals()[name] for name in __all__}))
