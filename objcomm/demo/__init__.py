"""A complete example program: train, evaluate and report on real data, on several ranks.

``python -m objcomm.demo`` starts the ranks with ``objcomm.launch``. Each rank runs ``job``; read
its ``run`` first. ``learning`` has the data, training and evaluation, and ``config`` the settings.
The program uses only objcomm's public names.

Importing this package raises ``MissingDependencyError`` if it needs a package that is not
installed.
"""

from importlib.util import find_spec

from objcomm import MissingDependencyError

_NEEDED = {
    "numpy": "numpy",
    "sklearn": "scikit-learn",
    "matplotlib": "matplotlib",
    "tqdm": "tqdm",
}

# Checked here and not where each is used, so that the error names all, before any rank has started.
_missing = [package for package in _NEEDED if find_spec(package) is None]
if _missing:
    raise MissingDependencyError(_missing[0], " ".join(_NEEDED[package] for package in _missing))
