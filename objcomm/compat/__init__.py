"""Other libraries' names and signatures over objcomm; import a module of it by its own name.

What each of them cures is listed in the documentation, beside the line to change ("Migrating").
"""

import objcomm._public  # noqa: F401  # their errors go by its names
