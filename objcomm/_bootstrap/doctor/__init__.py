"""``python -m objcomm doctor``: which ranks meet, who reaches whom, how fast, and what that means.

It measures instead of predicting: Gloo itself says where it listens. Every wait has a limit, and
what another rank has left in the store is read as a record of known fields.
"""
