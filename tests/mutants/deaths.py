"""Defects of who is taken for alive, and of who is named for a death."""

from tests.mutants.mutant import Mutant

_UNIT = ("tests/unit/test_liveness.py",)
_RANKS = ("tests/group/test_liveness.py",)

MUTANTS = (
    Mutant(
        "zombies-alive",
        "objcomm/transport/liveness.py",
        "return bool(watched.poll(0)) or _is_another_or_ending(self.pid, self.born)",
        "return False",
        "a process that has ended is taken for alive until its parent has heard of it",
        _UNIT,
    ),
    Mutant(
        "births-ignored",
        "objcomm/transport/liveness.py",
        "return began != born or bool(flags & _PF_EXITING)",
        "return bool(flags & _PF_EXITING)",
        "a number that the kernel uses again is taken for the process that had it before",
        _UNIT,
    ),
    Mutant(
        "strangers-looked-up-here",
        "objcomm/transport/liveness.py",
        "if process.word or process.place != self.own.place or not process.has_ended():",
        "if process.word or not process.has_ended():",
        "of a process on another host it is asked here whether it is there",
        _UNIT,
    ),
    Mutant(
        "earlier-worlds-believed",
        "objcomm/transport/liveness.py",
        "if self.is_new or not is_other or not self._end(process):",
        "if True:",
        "the word that an earlier world's rank left ends a wait of the next",
        _UNIT,
    ),
    Mutant(
        "meetings-never-in-vain",
        "objcomm/transport/blame.py",
        "for peer in mesh.others if is_meeting else [entry.awaits] if entry.awaits >= 0 else []:",
        "for peer in [] if is_meeting else [entry.awaits] if entry.awaits >= 0 else []:",
        "a first use waits for a rank that has died until its limit",
        _RANKS,
    ),
    Mutant(
        "connected-ranks-never-in-vain",
        "objcomm/transport/blame.py",
        "for peer in mesh.others if is_meeting else [entry.awaits] if entry.awaits >= 0 else []:",
        "for peer in mesh.others if is_meeting else []:",
        "a forked child that holds a dead rank's sockets lets the others wait",
        _RANKS,
    ),
    Mutant(
        "blocks-without-their-dead",
        "objcomm/transport/blame.py",
        "        if reason.startswith(KILLED):\n            return Verdict",
        "        if not reason.startswith(KILLED):\n            continue\n        if not inside:\n"
        "            return Verdict",
        "in a block two ranks wait for each other though a third one has died",
        _RANKS,
    ),
    Mutant(
        "the-nearest-named",
        "objcomm/transport/blame.py",
        "ranks=named or tuple(died), reason=verdict.reason if named else why",
        "reason=verdict.reason",
        "who raised because another died is named in its place",
        _RANKS,
    ),
    Mutant(
        "no-word-at-the-end",
        "objcomm/transport/bulletin.py",
        "        self.tell_end(self.rank, word)\n",
        "",
        "a program that came to its end is told as one that died",
        _RANKS,
    ),
    Mutant(
        "watcher-not-replaced",
        "objcomm/transport/watch.py",
        "            elif not self._watcher.is_alive():\n"
        "                self._watcher = Watcher(self._watcher)\n",
        "",
        "after the watcher's thread has ended nobody watches any wait",
        _RANKS,
    ),
    Mutant(
        "own-failure-blamed-on-others",
        "objcomm/transport/mesh.py",
        '_OF_A_PEER = ("onnect", "imed out", "imeout")',
        '_OF_A_PEER = ("",)',
        "a rank that has no such network interface names all others",
        _RANKS,
    ),
    Mutant(
        "stuck-sends-waited-for",
        "objcomm/transport/gloo.py",
        "        self._apart.abandon()\n",
        "",
        "a send that Gloo has forgotten holds a rank until the limit",
        _RANKS,
    ),
    Mutant(
        "destroyed-groups-kept",
        "objcomm/transport/watch.py",
        "        if is_look:\n            self._leave_destroyed()\n",
        "",
        "who waits in a group that another rank has destroyed hears nothing of it",
        _RANKS,
    ),
    Mutant(
        "users-of-torch-alone-unseen",
        "objcomm/transport/inquiry.py",
        "and mesh.bulletin.is_cut_off(rank)",
        "and not rank < 1000",
        "a first use waits for a rank that ended without ever calling objcomm",
        _RANKS,
    ),
)
