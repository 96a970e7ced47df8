"""A function is sent with the codec for plain data.

ranks: 2
all: CollectiveError
    says broadcast failed on rank 0: … EncodeError … ['schedule']
    says function
    says codec='pickle'
    shows %broadcast
"""

import objcomm

objcomm.init()
config = {"lr": 0.1, "schedule": lambda step: 0.1 / (1 + step)}
config = objcomm.broadcast(config, codec="msgpack")  # @broadcast
