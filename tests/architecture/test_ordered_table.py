"""Does every row of ARCHITECTURE.md that claims a proof name tests, or steps of the check command, that exist?"""

import ast
import re

import check
import pytest
from sources import ROOT, tree

SECTIONS = ("Invariants", "What was ordered, and what proves it")
TEST = re.compile(r"`((?:[\w.-]+/)+\w+\.py)::(test_\w+)`")
STEP = re.compile(r"step `([\w-]+)`")
LEAST_ROWS = {"Invariants": 12, "What was ordered, and what proves it": 60}


def rows(section: str) -> list[tuple[str, str]]:
    """(sentence, proof cell) of every table row between this heading and the next of its level."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    body = re.split(r"^## ", text.split(f"\n## {section}\n")[1], flags=re.MULTILINE)[0]
    cells = [line.strip("|").split(" | ") for line in body.splitlines() if line.startswith("| ")]
    return [(row[0].strip(), row[-1].strip()) for row in cells if row[-1].strip() != "what proves it"]


def functions(path: str) -> set[str]:
    file = ROOT / ("" if path.startswith("packages/") else "tests") / path
    if not file.is_file():
        return set()
    return {node.name for node in ast.walk(tree(file)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("section", SECTIONS)
def test_each_row_names_a_proof_that_exists(section: str) -> None:
    steps = {step.name for step in check.steps("long")}
    found = rows(section)
    assert len(found) >= LEAST_ROWS[section]
    absent = []
    for sentence, cell in found:
        tests, named_steps = TEST.findall(cell), STEP.findall(cell)
        absent += [f"{sentence}: {path}::{name}" for path, name in tests if name not in functions(path)]
        absent += [f"{sentence}: step {name}" for name in named_steps if name not in steps]
        if len(tests) + len(named_steps) != len(cell.split(", ")):
            absent.append(f"{sentence}: {cell!r} is not a list of proofs")
    assert absent == []
