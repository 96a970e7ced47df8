"""Any Python object between the ranks of a PyTorch job: fast, exact, and never a silent hang."""

from objcomm import recorder
from objcomm.codecs import register, register_codec
from objcomm.collectives import all_gather, barrier, broadcast, gather
from objcomm.config import check, configure
from objcomm.control import ddp_broadcast
from objcomm.counters import OperationStats
from objcomm.eager import keep_eager
from objcomm.errors import (
    AuthenticationError,
    BrokenGroupError,
    CodecError,
    CollectiveError,
    DecodeError,
    DesyncError,
    EncodeError,
    ForbiddenTypeError,
    MissingDependencyError,
    NotInGroupError,
    ObjcommError,
    Position,
    RankFailure,
    TransportError,
    TransportTimeout,
    UsageError,
    WireError,
)
from objcomm.group import lane
from objcomm.metrics import all_gather_scalar, gather_scalar, reduce_and_broadcast
from objcomm.model import (
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
from objcomm.ops import Op
from objcomm.p2p import irecv, isend, recv, send, sendrecv
from objcomm.probing import Envelope, iprobe, probe
from objcomm.reductions import all_reduce, reduce
from objcomm.scans import exscan, scan
from objcomm.scattering import all_to_all, reduce_scatter, scatter
from objcomm.serialization import from_tensor, to_tensor
from objcomm.shards import Shard, loader
from objcomm.subgroups import dup, leaders, node_group, split
from objcomm.together import fail_together
from objcomm.work import Work, as_completed, wait_all
from objcomm.world import is_initialized, is_main, rank, reset_stats, stats, world_size

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
    "MissingDependencyError",
    "NotInGroupError",
    "ObjcommError",
    "Op",
    "OperationStats",
    "Position",
    "RankFailure",
    "Shard",
    "TransportError",
    "TransportTimeout",
    "UsageError",
    "WireError",
    "Work",
    "all_gather",
    "all_gather_scalar",
    "all_reduce",
    "all_to_all",
    "as_completed",
    "average_tensors",
    "barrier",
    "broadcast",
    "broadcast_model",
    "broadcast_tensors",
    "check",
    "configure",
    "ddp_broadcast",
    "dup",
    "eager_sync_gradients",
    "eager_sync_model",
    "exscan",
    "fail_together",
    "from_tensor",
    "gather",
    "gather_scalar",
    "iprobe",
    "irecv",
    "is_initialized",
    "is_main",
    "isend",
    "lane",
    "leaders",
    "loader",
    "node_group",
    "probe",
    "rank",
    "recorder",
    "recv",
    "reduce",
    "reduce_and_broadcast",
    "reduce_scatter",
    "register",
    "register_codec",
    "reset_stats",
    "scan",
    "scatter",
    "send",
    "sendrecv",
    "split",
    "stats",
    "sync_buffer",
    "sync_buffers",
    "sync_grad",
    "sync_gradients",
    "sync_model",
    "to_tensor",
    "wait_all",
    "world_size",
    "wrap",
]

keep_eager([*(globals()[name] for name in __all__), recorder.dump])
del keep_eager  # no public name
