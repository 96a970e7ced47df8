"""``objcomm`` and ``python -m objcomm``: check ranks before a job, watch them, read their records.

Knows only the command lines, so that ``--help`` does not import torch.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import objcomm


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the command line names, and return the exit status."""
    given = sys.argv[1:] if argv is None else argv
    is_module = sys.modules["__main__"].__spec__ is not None  # else the console command
    typed = "python -m objcomm" if is_module else "objcomm"
    if given[:1] == ["run"]:  # all that follows belongs to the program, options included
        importlib.import_module("objcomm.run").main(given[1:], typed=f"{typed} run")
    arguments = _parser(typed).parse_args(given)
    command = importlib.import_module(f"objcomm.{arguments.module}")
    status: int = command.run(arguments, arguments.refuse)
    return status


def _parser(typed: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=typed,
        description="Checks ranks before a job, watches them, and reads what they wrote; or runs "
        "a program with torch's object collectives replaced.",
        epilog="python -m objcomm.demo trains and evaluates on a few ranks, to try objcomm.",
    )
    parser.add_argument("--version", action="version", version=f"objcomm {objcomm.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser(
        "run", help="run a program with torch's object collectives replaced by objcomm's"
    )  # only for the list of commands; ``main`` handles it itself
    inspecting = commands.add_parser(
        "inspect",
        help="compare the ranks' dumps and report where they diverge",
        description="Reads what objcomm.recorder.dump, or an error with a record folder, wrote on "
        "each rank; matches the ranks' calls; prints them; and says where the ranks diverge. Lines "
        "marked > are the calls that differ.",
        epilog="Example: %(prog)s records/ --trace trace.json",
    )
    inspecting.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="a rank's dump, or a folder with objcomm-*.json files",
    )
    inspecting.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write the calls as a Chrome trace, for https://ui.perfetto.dev",
    )
    inspecting.add_argument(
        "--last",
        type=int,
        default=20,
        metavar="N",
        help="show the last N calls of each lane, and all marked calls (default: %(default)s)",
    )
    inspecting.set_defaults(module="_observe.inspect.command", refuse=inspecting.error)

    examining = commands.add_parser(
        "doctor",
        help="report why ranks would fail to meet, or would be slow",
        description="Run alone, it checks this host. Started by torchrun, srun or mpirun on every "
        "rank, it also checks that the ranks meet, that each reaches every other, and how fast "
        "their links are; rank 0 reports. A rank that can't reach rank 0 reports to stderr.",
        epilog="Exit status: 0 if nothing was found, 1 if something will break or slow a job, 2 if "
        "an argument is wrong. Example: torchrun --nproc-per-node 4 -m objcomm doctor --png a.png",
    )
    examining.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="check with N ranks started on this host; not for use under a launcher",
    )
    examining.add_argument(
        "--timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how long to wait for the ranks, and how long the checks may then take "
        "(default: %(default)g)",
    )
    examining.add_argument("--quick", action="store_true", help="do not measure the links")
    examining.add_argument(
        "--png", type=Path, metavar="FILE", help="draw latency and bandwidth as heat maps"
    )
    examining.add_argument("--json", type=Path, metavar="FILE", help="write all findings")
    examining.set_defaults(module="_bootstrap.doctor.command", refuse=examining.error)

    watching = commands.add_parser(
        "top",
        help="show live what each rank of a running job is doing",
        description="Attaches to a running job through the store in which its ranks met, and "
        "shows for each rank its call, which rank it waits for and for how long, its line, its "
        "calls and bytes per second, and how long others waited for it in the last minute.",
        epilog="Exit status: 0 if the job was found, 1 if not, 2 if an argument is wrong. "
        "Example: %(prog)s --store node0:29500",
    )
    watching.add_argument(
        "--store",
        metavar="HOST:PORT",
        help="the job's store (default: MASTER_ADDR and MASTER_PORT from the environment)",
    )
    watching.add_argument(
        "--interval",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="time between two updates (default: %(default)g)",
    )
    watching.add_argument(
        "--once", action="store_true", help="watch for one interval, print it, and exit"
    )
    watching.add_argument("--json", action="store_true", help="print a JSON object for each update")
    watching.add_argument(
        "--prometheus",
        type=int,
        metavar="PORT",
        help="also serve metrics on this port of 127.0.0.1; 0 picks a free one",
    )
    watching.set_defaults(module="_bootstrap.top", refuse=watching.error)
    return parser


if __name__ == "__main__":
    sys.exit(main())
