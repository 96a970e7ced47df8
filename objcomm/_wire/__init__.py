"""One message: its layout, its proof of origin, what is let in, and a failure in its place.

Knows codecs by name and bytes by length; nothing of links, or of who sends to whom.
"""
