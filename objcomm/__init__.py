"""Any Python object between the ranks of a PyTorch job: fast, exact, and never a silent hang.

What is public stands here. The code stands in rooms, and each imports only from those before it:

- ``errors``, ``config``, ``environment`` and ``world`` are the ground: what can go wrong, what is
  set, where this process runs, and torch's process groups.
- ``codecs`` turn an object into bytes and back; ``wire`` is one message, made of them.
- ``observe`` notes what this rank does, for people and for errors.
- ``transport`` carries bytes between ranks, ``algorithms`` say who sends what to whom, and
  ``failures`` see to it that no wait is a silent one.
- ``calls`` are a group and one call on it; ``collectives`` and ``p2p`` are the operations.
- ``training`` helps with models, metrics and data; ``bootstrap`` starts ranks and examines hosts.
- ``compat`` has other libraries' names for it, ``run`` runs their programs
  unchanged, and ``demo`` is a program that uses all this.
"""

import gc

# Once torch is imported, a collection of all its objects is nearly due. It would fall into this
# import and take longer than the import, to find nothing: what an import makes is there to stay.
_was_collecting = gc.isenabled()
gc.disable()
try:
    from objcomm.bootstrap.init import Start, ddp_init_group, init, shutdown
    from objcomm.bootstrap.launch import launch
    from objcomm.calls.group import is_main, lane
    from objcomm.calls.work import Envelope, Work, as_completed, wait_all
    from objcomm.codecs.base import register_codec
    from objcomm.codecs.types import register
    from objcomm.collectives.agree import agree, all_ranks, any_rank, shared_seed
    from objcomm.collectives.broadcast import barrier, broadcast
    from objcomm.collectives.fail_together import fail_together
    from objcomm.collectives.gather import all_gather, gather
    from objcomm.collectives.reduction.operators import Op
    from objcomm.collectives.reduction.reduce import all_reduce, reduce
    from objcomm.collectives.reduction.scan import exscan, scan
    from objcomm.collectives.scatter import all_to_all, reduce_scatter, scatter
    from objcomm.collectives.split import dup, leaders, new_group, node_group, split
    from objcomm.config import check, configure
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
    from objcomm.observe import recorder
    from objcomm.observe.history import OperationStats
    from objcomm.observe.stats import reset_stats, stats, stats_to_prometheus, stats_to_tensorboard
    from objcomm.observe.tracing import keep_eager
    from objcomm.p2p.messages import (
        iprobe,
        irecv,
        isend,
        issend,
        probe,
        recv,
        send,
        sendrecv,
        ssend,
    )
    from objcomm.training.data import Shard, loader
    from objcomm.training.main_process import (
        compute_and_broadcast,
        ddp_broadcast,
        main_first,
        main_only,
        main_process_only,
        node_first,
        rank_prefixed_message,
        run_on_main,
        zero_first,
        zero_only,
    )
    from objcomm.training.metrics import (
        all_gather_scalar,
        average_metrics,
        gather_from_all_ranks,
        gather_scalar,
        gather_scalar_from_all_ranks,
        reduce_and_broadcast,
    )
    from objcomm.training.model import (
        average_tensors,
        broadcast_model,
        broadcast_tensors,
        eager_sync_gradients,
        eager_sync_model,
        sync_buffer,
        sync_buffers,
        sync_grad,
        sync_gradients,
        sync_model,
        wrap,
    )
    from objcomm.training.once import once_per_node, run_once_per_node
    from objcomm.wire.as_tensor import from_tensor, to_tensor
    from objcomm.world import is_initialized, rank, world_size
finally:
    if _was_collecting:
        gc.enable()
    del _was_collecting

__version__ = "0.1.0"

__all__ = [
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
    "MissingDependencyError",
    "NotInGroupError",
    "ObjcommError",
    "Op",
    "OperationStats",
    "Position",
    "RankFailure",
    "Shard",
    "Start",
    "StartError",
    "TransportError",
    "TransportTimeout",
    "UsageError",
    "WireError",
    "Work",
    "agree",
    "all_gather",
    "all_gather_scalar",
    "all_ranks",
    "all_reduce",
    "all_to_all",
    "any_rank",
    "as_completed",
    "average_metrics",
    "average_tensors",
    "barrier",
    "broadcast",
    "broadcast_model",
    "broadcast_tensors",
    "check",
    "compute_and_broadcast",
    "configure",
    "ddp_broadcast",
    "ddp_init_group",
    "dup",
    "eager_sync_gradients",
    "eager_sync_model",
    "exscan",
    "fail_together",
    "from_tensor",
    "gather",
    "gather_from_all_ranks",
    "gather_scalar",
    "gather_scalar_from_all_ranks",
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
    "main_only",
    "main_process_only",
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
    "register_codec",
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
    "stats_to_prometheus",
    "stats_to_tensorboard",
    "sync_buffer",
    "sync_buffers",
    "sync_grad",
    "sync_gradients",
    "sync_model",
    "to_tensor",
    "wait_all",
    "world_size",
    "wrap",
    "zero_first",
    "zero_only",
]

for _name in __all__:
    # So tracebacks and pickles have the name that stays, wherever the code moves.
    if _name != "recorder":  # a module
        globals()[_name].__module__ = __name__
del _name

keep_eager([*(globals()[name] for name in __all__), recorder.dump])
del gc, keep_eager  # no public names
