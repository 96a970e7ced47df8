"""Run by the new environment's interpreter, outside the checkout: does the package work?"""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import objcomm


def greet(config: dict[str, float] | None) -> tuple[int, dict[str, float] | None]:
    """Return what each rank returns."""
    return objcomm.rank(), objcomm.broadcast(config if objcomm.is_main() else None)


def main() -> None:
    """Try what a new user tries first; raise at the first failure."""
    origin = Path(objcomm.__file__)
    if not origin.is_relative_to(sys.prefix):
        raise AssertionError(f"{origin} was imported, which is not what was installed")
    if metadata.version("objcomm") != objcomm.__version__:
        raise AssertionError("the metadata has another version than the module")
    results = objcomm.launch(greet, 2, {"lr": 0.1})
    if results != [(0, {"lr": 0.1}), (1, {"lr": 0.1})]:
        raise AssertionError(f"two ranks got {results}")
    for command in (["-m", "objcomm"], [str(Path(sys.executable).with_name("objcomm"))]):
        commands = printed(*command, "--help")
        if "inspect" not in commands:
            raise AssertionError(f"{command} --help printed {commands}")
    # torch does not bring anything that the demo needs.
    refused = printed("-m", "objcomm.demo", "--nproc", "1", fails=True)
    if "pip install numpy scikit-learn matplotlib tqdm" not in refused:
        raise AssertionError(f"the demo does not say what it needs:\n{refused}")


def printed(*arguments: str, fails: bool = False) -> str:
    """Return what another run of this interpreter prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if (done.returncode != 0) is not fails:
        raise AssertionError(f"{arguments} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


if __name__ == "__main__":
    main()
