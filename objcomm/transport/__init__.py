"""Bytes from rank to rank: links, the lanes over them, and how ranks meet to connect.

Knows peers, connections and time limits; nothing of objects, or of what a message is for.
"""
