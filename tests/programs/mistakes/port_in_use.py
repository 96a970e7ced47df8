"""Another program uses the port on which the ranks should meet.

ranks: 1, by hand
0: StartError
    says init: rank 0 of 2 … in use … MASTER_PORT
    never frame #
"""

import os
import socket

import objcomm

os.environ["WORLD_SIZE"] = "2"
taken = socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"])))
objcomm.init(timeout=3)
