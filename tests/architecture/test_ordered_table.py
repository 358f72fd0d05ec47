"""Every test that ARCHITECTURE.md names as a proof exists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PROOF = re.compile(r"`((?:[\w.-]+/)+test_\w+\.py)::(test_\w+)`")


def proofs() -> list[tuple[Path, str]]:
    found = _PROOF.findall((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"))
    return [(ROOT / ("" if path.startswith("packages/") else "tests") / path, name) for path, name in found]


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_each_row_names_a_test_that_exists() -> None:
    rows = proofs()
    assert len(rows) > 30
    absent = [f"{path.relative_to(ROOT)}::{name}" for path, name in rows if name not in functions(path)]
    assert not absent
