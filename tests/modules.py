"""The modules of the package, by their names within it."""

from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "objcomm"


def name_of(path: Path) -> str:
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
