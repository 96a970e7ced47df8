"""A function that was imported by name before ``patch()`` is replaced there, too.

ranks: 2
all: exit 0
"""

import torch.distributed
from torch.distributed import all_gather_object

import objcomm
from objcomm.compat.torch import patch

objcomm.init()
with patch():
    gathered = [None, None]
    all_gather_object(gathered, "imported before")
    if all_gather_object is not torch.distributed.all_gather_object:
        raise AssertionError("it is torch's still")
objcomm.shutdown()
