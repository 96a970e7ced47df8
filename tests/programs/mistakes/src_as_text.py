"""The rank comes from the command line, as text.

ranks: 2
all: UsageError
    says broadcast: src must be an integer … '0'
"""

import objcomm

objcomm.init()
objcomm.broadcast("config", src="0")
