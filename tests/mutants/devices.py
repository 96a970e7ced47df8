"""Defects of the way between accelerators, which the stand-in device shows."""

from tests.mutants.mutant import Mutant

_OBJECTS = ("tests/standin/test_objects.py",)
_FAULTS = ("tests/standin/test_faults.py",)
_DEVICE = "objcomm/_algorithms/device.py"
_ROUTES = "objcomm/_algorithms/routes.py"
_WORK = "objcomm/_calls/work.py"

MUTANTS = (
    Mutant(
        "member-leaves-from-its-own-device",
        _DEVICE,
        "        yield flat.to(link.device)  # which moves it from another device of the type, too",
        "        yield flat",
        "a root uses two devices where its backend connects one, and NCCL waits for ever",
        _OBJECTS,
    ),
    Mutant(
        "no-meeting-before-devices",
        _ROUTES,
        '    all_meet(exchange, compose(exchange.header, b""))\n',
        "",
        "ranks wait on the device for one that has no room there, and has raised",
        _FAULTS,
    ),
    Mutant(
        "callers-stream-forgotten",
        _WORK,
        "        torch.accelerator.set_stream(self._stream)\n",
        "",
        "a call in the background sends what the caller's stream has not computed",
        _OBJECTS,
    ),
    Mutant(
        "context-made-by-asking",
        _WORK,
        '        if getattr(module, "is_initialized", _is_ready)():\n',
        "        if True:\n",
        "a program without tensors on a device takes memory there",
        _OBJECTS,
    ),
)
