"""The names of other libraries over objcomm's functions, one module for each library.

``import objcomm`` does not import them. What each of them cures is listed in the documentation,
beside the line to change ("Migrating").
"""
