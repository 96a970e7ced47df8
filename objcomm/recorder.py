"""Write this rank's last calls to a file for ``python -m objcomm inspect``."""

from objcomm._observe.published import publish
from objcomm._observe.recorder import dump

__all__ = [
    "dump",
]

globals().update(publish(__name__, {name: globals()[name] for name in __all__}))
