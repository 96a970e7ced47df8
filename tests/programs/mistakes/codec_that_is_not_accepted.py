"""Rank 0 accepts only msgpack, but rank 1 still sends pickles.

ranks: 2
0: DecodeError
    says 'pickle' … rank 1 | rank 1 … 'pickle'
    says accepts only msgpack
    says at @gather
    says codec= | accept=
1: any
"""

import objcomm

objcomm.init()
if objcomm.rank() == 0:
    objcomm.configure(codec="msgpack", accept={"msgpack"})
objcomm.all_gather({"loss": 0.5})  # @gather
objcomm.shutdown()
