"""A whole program on objcomm: train, evaluate and report on real data, on several ranks.

``python -m objcomm.demo`` starts the ranks by ``objcomm.launch``; each runs ``job``, whose ``run``
is the program to read first. The other modules are what any such program has: ``config``,
``digits`` (the data), ``training``, ``evaluation`` and ``report``. They use objcomm's public names
only.

Importing this package raises ``MissingDependencyError`` where the extra ``demo`` is not installed.
"""

from importlib.util import find_spec

from objcomm import MissingDependencyError

# Asked here and not where each is used: a user hears of it before four ranks have started.
for _package in ("numpy", "sklearn", "matplotlib", "tqdm"):
    if find_spec(_package) is None:
        raise MissingDependencyError(_package, "demo")
