"""``python -m objcomm doctor``: which ranks meet, who reaches whom, how fast, and what that means.

Takes nothing for granted: every wait has a limit, and what another rank tells is checked.
"""
