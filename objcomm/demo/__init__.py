"""A whole program on objcomm: train, evaluate and report on real data, on several ranks.

``python -m objcomm.demo`` starts the ranks by ``objcomm.launch``; each runs ``job``, whose ``run``
is the program to read first. ``learning`` has the data, training and evaluation, and ``config``
what a user may set. They use objcomm's public names only.

Importing this package raises ``MissingDependencyError`` where a package that it needs is missing.
"""

from importlib.util import find_spec

from objcomm import MissingDependencyError

_NEEDED = {
    "numpy": "numpy",
    "sklearn": "scikit-learn",
    "matplotlib": "matplotlib",
    "tqdm": "tqdm",
}

# Asked here and not where each is used: a user hears of all, and before four ranks have started.
_missing = [package for package in _NEEDED if find_spec(package) is None]
if _missing:
    raise MissingDependencyError(_missing[0], " ".join(_NEEDED[package] for package in _missing))
