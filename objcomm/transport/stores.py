"""A store in which ranks meet, hosted by this process without a name to look up.

The host of torch's ``TCPStore`` looks up the name of whoever connects, and answers nobody
meanwhile: where the resolver loses a query, a new connection holds all ranks for 5 s.
"""

from __future__ import annotations  # torch may be built without distributed

import socket

import torch.distributed as dist


def loopback_store() -> dist.TCPStore:
    """A store that this process hosts for ranks on this machine, on a free port.

    On a socket for both families, as torch makes it, a client is called ``::ffff:127.0.0.1``, which
    is in no hosts file. On this one it is ``127.0.0.1``, and nobody has to be asked for its name.
    """
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return dist.TCPStore(
            "127.0.0.1",
            listening.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
