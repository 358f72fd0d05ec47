"""Which source files the rules of tests/architecture look at."""

import ast
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


@cache
def tracked_files() -> tuple[Path, ...]:
    """Every file of the tree that git knows or would add, generated code included."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return tuple(path for name in sorted(set(listed.stdout.splitlines())) if (path := ROOT / name).is_file())


def python_files(*, tests: bool = True) -> tuple[Path, ...]:
    """Hand-written Python files; `tests=False` leaves those below a folder named tests out."""
    return tuple(
        path
        for path in tracked_files()
        if path.suffix == ".py"
        and not path.name.endswith(GENERATED)
        and (tests or "tests" not in path.relative_to(ROOT).parts)
    )


def package_files(distribution: str) -> tuple[Path, ...]:
    """Hand-written Python files of one package's import tree."""
    return tuple(path for path in python_files() if (ROOT / "packages" / distribution / "src") in path.parents)


@cache
def tree(path: Path) -> ast.Module:
    """A file's syntax tree."""
    return ast.parse(path.read_text(), str(path))


def shown(path: Path) -> str:
    """A path as a reader of the repository knows it."""
    return str(path.relative_to(ROOT))
