"""A function was imported by name before ``patch()`` came, so it stays torch's.

ranks: 2
all: exit 0
    says all_gather_object … imported
"""

from torch.distributed import all_gather_object

import objcomm
from objcomm.compat.torch import patch

objcomm.init()
with patch():
    gathered = [None, None]
    all_gather_object(gathered, "imported before")
objcomm.shutdown()
