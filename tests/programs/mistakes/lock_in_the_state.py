"""The state of rank 1 contains a lock, which no codec can encode.

ranks: 2
all: CollectiveError
    says all_gather failed on rank 1: … EncodeError
    says ['loader']['lock']
    says lock
    shows %gather
"""

import threading
from typing import Any

import objcomm

objcomm.init()
state: dict[str, Any] = {"step": 100, "loader": {"epoch": 3}}
if objcomm.rank() == 1:
    state["loader"]["lock"] = threading.Lock()
states = objcomm.all_gather(state)  # @gather
