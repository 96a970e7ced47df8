"""Move any Python object between the ranks of a PyTorch job: fast, exact, and never a silent hang.

These are the calls that most programs need. Every rank makes them in the same order:

- ``init()`` joins the ranks that torchrun, SLURM or MPI has started; ``shutdown()`` leaves them.
- ``rank()`` is this process's number; ``world_size()`` is the number of ranks.
- ``broadcast(obj)`` sends rank 0's object to every rank.
- ``gather(obj)`` returns a list of all ranks' objects on rank 0; ``all_gather(obj)`` returns it on
  every rank.
- ``scatter(objects)`` sends each rank its item of rank 0's list.
- ``all_reduce(obj, op)`` combines all ranks' objects with an operator such as ``"sum"`` or
  ``"union"``, or with a function of two objects.
- ``barrier()`` returns when all ranks have called it.

Without a launcher, the program is the only rank, and every call works:

    >>> import objcomm
    >>> start = objcomm.init()
    >>> config = objcomm.broadcast({"lr": 0.1} if objcomm.rank() == 0 else None)
    >>> config
    {'lr': 0.1}
    >>> objcomm.gather({"rank": objcomm.rank(), "score": 40})
    [{'rank': 0, 'score': 40}]
    >>> objcomm.all_reduce({"cat"}, "union")
    {'cat'}
    >>> objcomm.shutdown()

``help(objcomm.broadcast)`` describes one call. Start several ranks with
``torchrun --nproc-per-node=4 train.py``.

For readers of the code: these are the packages and modules. Each imports only from those before it.
Names with an underscore are private.

- ``errors``, ``_config``, ``_environment`` and ``_world`` are the base layer: errors, options, the
  place of this process, and torch's process groups.
- ``_codecs`` turns objects into bytes and back; ``_wire`` defines the messages that carry them.
- ``_observe`` records what this rank does, for users and for errors.
- ``_transport`` moves bytes between ranks, ``_algorithms`` decides which rank sends what to which,
  and ``_failures`` ensures that no wait hangs silently.
- ``_calls`` defines groups and single calls; ``_collectives`` and ``_p2p`` are the operations.
- ``_training`` helps with models, metrics and data; ``_bootstrap`` starts ranks and examines hosts.
- ``_public`` lists this package's public names; ``codecs``, ``exporters``, ``metrics``, ``models``
  and ``recorder`` have those of one topic each.
- ``compat`` provides functions under other libraries' names, ``run`` runs a program with torch's
  object collectives replaced, and ``demo`` is an example program.
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
        """Import all public names when the first is used, because they need torch."""
        if name.startswith("_") and name != "__all__":  # Python itself looks up such names
            raise AttributeError(f"module 'objcomm' has no attribute {name!r}")
        from objcomm import _public  # noqa: PLC0415  # only when needed

        names = {each: getattr(_public, each) for each in ["__all__", *_public.__all__]}
        globals().update(names)
        try:
            return names[name]
        except KeyError:
            from objcomm._config import NAMES_ELSEWHERE  # noqa: PLC0415  # likewise

            topics = [each for each in names.values() if hasattr(each, "__all__")]
            at = [f"; it is {each.__name__}.{name}" for each in topics if name in each.__all__]
            if name in NAMES_ELSEWHERE:
                at.append(f"; it is called objcomm.{NAMES_ELSEWHERE[name]} here")
            message = f"module 'objcomm' has no attribute {name!r}{''.join(at)}"
            raise AttributeError(message) from None

    @atexit.register  # registered at import, so it runs after the program's own exit handlers
    def _end() -> None:
        watchdog = sys.modules.get("objcomm._failures.watchdog")
        if watchdog is not None:
            watchdog.close()

    def __dir__() -> list[str]:
        return sorted([*__getattr__("__all__"), "__all__", "__doc__", "__file__", "__version__"])
