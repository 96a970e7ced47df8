"""Only rank 0 makes its call inside ``fail_together``.

ranks: 2
all: DesyncError
    says rank 0 … fail_together … at @block
    says rank 1 … all_gather (call 0) at @bare
"""

import objcomm

objcomm.init()
if objcomm.rank() == 0:
    with objcomm.fail_together():  # @block
        pass
else:
    objcomm.all_gather("shard")  # @bare
