"""One message: its layout, its proof of origin, its admission, and failures sent in its place.

Knows codecs by name and bytes by length. Knows nothing of links, or of who sends to whom.
"""
