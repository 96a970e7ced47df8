"""A generator is gathered instead of its items.

ranks: 2
all: CollectiveError
    says all_gather failed on ranks 0-1
    says EncodeError … generator
    says list(
"""

import objcomm

objcomm.init()
scores = objcomm.all_gather(score / 10 for score in range(3))
