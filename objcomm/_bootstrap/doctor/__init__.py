"""``python -m objcomm doctor``: check whether ranks meet and reach each other, and how fast.

It measures instead of predicting; for example, Gloo itself reports where it listens. Every wait has
a timeout, and whatever another rank has put into the store is read as a record of known fields.
"""
