"""Run the examples of all public names in one process, except those that start other ranks."""

from tests.documented import documented_modules, run_examples

_STARTS_RANKS = "objcomm._bootstrap.launch"


def main() -> None:
    """Fail if an example does not print what it shows."""
    names = [name for name in documented_modules() if name != _STARTS_RANKS]
    assert len(names) > 1
    for name in names:
        run_examples(name)


if __name__ == "__main__":
    main()
