"""Defects of the link between ranks of one host, and of how they come to have it."""

from tests.mutants.mutant import Mutant

_UNIT = ("tests/unit/test_local_link.py",)
_RANKS = ("tests/group/test_connect.py",)
_LOCAL = "objcomm/transport/local.py"
_CONNECT = "objcomm/transport/connect.py"

MUTANTS = (
    Mutant(
        "turns-not-passed-on",
        _LOCAL,
        "            else:\n                self._wake_one()\n\n    def _wake_one",
        "\n    def _wake_one",
        "when the thread that moved has its own the others sleep until their limits",
        _UNIT,
    ),
    Mutant(
        "credit-never-told",
        _LOCAL,
        "if untold >= _TOLD_EACH:",
        "if untold >= 1 << 40:",
        "a sender stands after four messages",
        _UNIT,
    ),
    Mutant(
        "credit-without-end",
        _LOCAL,
        "connection.ahead.get(tag, 0) >= AHEAD_MAX:",
        "connection.ahead.get(tag, 0) >= 1 << 40:",
        "a sender is so far ahead that nobody can tell why it waits",
        _UNIT,
    ),
    Mutant(
        "ends-before-the-last-bytes",
        _LOCAL,
        "                    self._read(connection, is_ending=bool(event & _ENDS))\n",
        "                    self._read(connection, is_ending=False)\n",
        "a connection is closed, and what is sent there says nothing of it",
        _UNIT,
    ),
    Mutant(
        "aborts-lose-what-has-come",
        _LOCAL,
        "self._read(each, is_ending=True)  # what has come is here, if not asked for",
        "pass",
        "a message that had come is lost when its rank gives up",
        _UNIT,
    ),
    Mutant(
        "content-for-nobody",
        _LOCAL,
        "        transfer = connection.taken.pop(number, None)\n        if transfer is None:\n",
        "        transfer = connection.taken.get(number)\n        if transfer is None:\n",
        "content may come twice, the second time into memory that somebody uses",
        _UNIT,
    ),
    Mutant(
        "much-goes-out-unasked",
        _LOCAL,
        "if nbytes > (_WORD_MAX_NBYTES if tag >> LANE_BITS else UNASKED_MAX_NBYTES):\n"
        "                    self._numbers",
        "if nbytes > UNASKED_MAX_NBYTES:\n                    self._numbers",
        "who takes nothing keeps copies of what was sent",
        _UNIT,
    ),
    Mutant(
        "moves-not-elsewhere",
        _LOCAL,
        '        """See ``Link``."""\n        self._move_what_is_there()\n\n    def is_flowing',
        '        """See ``Link``."""\n\n    def is_flowing',
        "what a rank has begun stands while it waits for another group",
        _UNIT,
    ),
    Mutant(
        "accelerators-before-sends",
        "objcomm/algorithms/exchange.py",
        "        if self.device.linked:\n",
        "        if not self.device:\n",
        "a rank waits for its accelerator, and another one for what it had begun to send",
        ("tests/group/test_device_link.py",),
    ),
    Mutant(
        "proofs-unread",
        _CONNECT,
        "if not secrets.compare_digest(guest.said, self._word(place, self._place)):",
        "if not guest.said:",
        "a stranger who gives a rank's number gets its messages",
        _RANKS,
    ),
    Mutant(
        "users-unread",
        _CONNECT,
        "            if _is_ours(end):\n",
        "            if end:\n",
        "another user's process is let in",
        _RANKS,
    ),
    Mutant(
        "one-ranks-no-unheard",
        _CONNECT,
        "and NO_DOOR not in met.doors:",
        "and met.doors:",
        "a rank that has turned the link off is waited for there",
        _RANKS,
    ),
    Mutant(
        "waits-for-its-own-lock",
        _LOCAL,
        "elif self._is_owned_here() or not self._lock.acquire(timeout=_PATIENCE_SECONDS):",
        "elif not self._lock.acquire():",
        "a signal's handler that ends connections reads in the middle of what it has interrupted",
        _UNIT,
    ),
    Mutant(
        "goes-on-in-the-middle",
        _LOCAL,
        "                except BaseException:\n                    self._end(connection, _TORN)\n",
        "                except BaseException:\n",
        "after Ctrl-C the rest of a message is taken for the next one",
        _UNIT,
    ),
    Mutant(
        "sleeps-on-after-a-handler",
        _LOCAL,
        "                self._wake_mover()  # it sleeps on, whatever was moved meanwhile\n",
        "                pass\n",
        "what a signal's handler has moved nobody tells the wait that it has interrupted",
        _UNIT,
    ),
)
