"""Any Python object between the ranks of a PyTorch job: fast, exact, and never a silent hang.

The calls that most programs need. Every rank makes them, in the same order:

- ``init()`` joins the ranks that torchrun, SLURM or MPI has started; ``shutdown()`` leaves them.
- ``rank()`` is this process's number, ``world_size()`` how many ranks there are.
- ``broadcast(obj)`` gives every rank the object of rank 0.
- ``gather(obj)`` gives rank 0 a list of all ranks' objects; ``all_gather(obj)`` gives it to every
  rank.
- ``scatter(objects)`` gives each rank its item of rank 0's list.
- ``all_reduce(obj, op)`` combines all ranks' objects: by ``"sum"``, ``"union"`` and the like, or by
  a function of two objects.
- ``barrier()`` returns when all ranks have called it.

Without a launcher the program is the only rank, and every call works:

    >>> import objcomm
    >>> start = objcomm.init()
    >>> config = objcomm.broadcast({"lr": 0.1} if objcomm.rank() == 0 else None)
    >>> config
    {'lr': 0.1}
    >>> objcomm.gather({"rank": objcomm.rank(), "right": 40})
    [{'rank': 0, 'right': 40}]
    >>> objcomm.all_reduce({"cat"}, "union")
    {'cat'}
    >>> objcomm.shutdown()

``help(objcomm.broadcast)`` describes one call. Start several ranks with
``torchrun --nproc-per-node=4 train.py``.

For readers of the code: these are its packages and modules, and each imports only from those
before it. An underscore marks the private ones.

- ``errors``, ``_config``, ``_environment`` and ``_world`` are the ground: what can go wrong,
  what is set, where this process runs, and torch's process groups.
- ``_codecs`` turn an object into bytes and back; ``_wire`` is one message, made of them.
- ``_observe`` notes what this rank does, for people and for errors.
- ``_transport`` carries bytes between ranks, ``_algorithms`` say who sends what to whom, and
  ``_failures`` see to it that no wait is a silent one.
- ``_calls`` are a group and one call on it; ``_collectives`` and ``_p2p`` are the operations.
- ``_training`` helps with models, metrics and data; ``_bootstrap`` starts ranks and examines hosts.
- ``_public`` has the names that this package shows; those of one topic are in ``codecs``,
  ``exporters``, ``metrics``, ``models`` and ``recorder``.
- ``compat`` has other libraries' names for it, ``run`` runs their programs
  unchanged, and ``demo`` is a program that uses all this.
"""

import atexit
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from objcomm._public import *  # noqa: F403  # type checkers see what it lists
    from objcomm._public import __all__ as __all__
else:

    def __getattr__(name: str) -> Any:
        """All public names at once, when the first is used: they need torch."""
        if name.startswith("_") and name != "__all__":  # such as Python itself looks for
            raise AttributeError(f"module 'objcomm' has no attribute {name!r}")
        from objcomm import _public  # noqa: PLC0415  # not sooner

        names = {each: getattr(_public, each) for each in ["__all__", *_public.__all__]}
        globals().update(names)
        try:
            return names[name]
        except KeyError:
            from objcomm._config import NAMES_ELSEWHERE  # noqa: PLC0415  # not sooner

            topics = [each for each in names.values() if hasattr(each, "__all__")]
            at = [f"; it is {each.__name__}.{name}" for each in topics if name in each.__all__]
            if name in NAMES_ELSEWHERE:
                at.append(f"; it is called objcomm.{NAMES_ELSEWHERE[name]} here")
            said = f"module 'objcomm' has no attribute {name!r}{''.join(at)}"
            raise AttributeError(said) from None

    @atexit.register  # registered at import, so it runs after the program's own exit handlers
    def _end() -> None:
        watchdog = sys.modules.get("objcomm._failures.watchdog")
        if watchdog is not None:
            watchdog.close()

    def __dir__() -> list[str]:
        return sorted([*__getattr__("__all__"), "__all__", "__doc__", "__file__", "__version__"])
