"""Stores for the tests' own processes, in which the machine's resolver has no part."""

import socket
from datetime import timedelta

import torch.distributed as dist

__all__ = ["loopback_store"]


def loopback_store(timeout: timedelta = timedelta(seconds=300)) -> dist.TCPStore:
    """A store that this process hosts, on a free port.

    torch looks up the name of every client that connects. As ``::ffff:127.0.0.1``, which is what
    clients are called on a socket that listens on both families, it is in no hosts file, and where
    the resolver loses a query the store answers nobody for 5 s. On this socket it is ``127.0.0.1``.
    """
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return dist.TCPStore(
            "127.0.0.1",
            listening.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listening.detach(),
        )
