"""The codec's name is misspelled.

ranks: 2
all: UsageError
    says broadcast: codec='pickel' … msgpack, pickle
"""

import objcomm

objcomm.init()
objcomm.broadcast("config", codec="pickel")
