"""Does every row that claims a proof, of ARCHITECTURE.md or of the failures that are promised, name one that exists?"""

import ast
import re

import check
import pytest
from sources import ROOT, tree

SECTIONS = ("Invariants", "What was ordered, and what proves it")
FAILURES = ROOT / "packages/skyrl-rollout/docs/failures.md"
TEST = re.compile(r"`((?:[\w.-]+/)+\w+\.py)::(test_\w+)`")
STEP = re.compile(r"step `([\w-]+)`")
LEAST_ROWS = {"Invariants": 12, "What was ordered, and what proves it": 60}


def rows(section: str) -> list[tuple[str, str]]:
    """(sentence, proof cell) of every table row between this heading and the next of its level."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    body = re.split(r"^## ", text.split(f"\n## {section}\n")[1], flags=re.MULTILINE)[0]
    return [(row[0], row[-1]) for row in cells(body)]


def cells(text: str) -> list[list[str]]:
    """The cells of every table row but the heading."""
    lines = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    found = [[cell.strip() for cell in line] for line in lines]
    return [row for row in found if row[-1] != "what proves it"]


def functions(path: str) -> set[str]:
    file = ROOT / ("" if path.startswith("packages/") else "tests") / path
    if not file.is_file():
        return set()
    return {node.name for node in ast.walk(tree(file)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def not_proved(found: list[tuple[str, str]]) -> list[str]:
    """What is wrong with the proof cells of these rows."""
    steps = {step.name for step in check.steps("long")}
    absent = []
    for sentence, cell in found:
        tests, named_steps = TEST.findall(cell), STEP.findall(cell)
        absent += [f"{sentence}: {path}::{name}" for path, name in tests if name not in functions(path)]
        absent += [f"{sentence}: step {name}" for name in named_steps if name not in steps]
        if len(tests) + len(named_steps) != len(cell.split(", ")):
            absent.append(f"{sentence}: {cell!r} is not a list of proofs")
    return absent


@pytest.mark.parametrize("section", SECTIONS)
def test_each_row_names_a_proof_that_exists(section: str) -> None:
    found = rows(section)
    assert len(found) >= LEAST_ROWS[section]
    assert not_proved(found) == []


def test_each_promised_failure_names_tests_that_exist() -> None:
    found = cells(FAILURES.read_text())
    assert [row[0] for row in found] == [str(number) for number in range(1, 27)]
    assert {len(row) for row in found} == {4}
    assert not_proved([(f"failure {row[0]}", row[-1]) for row in found]) == []
    assert all(TEST.search(row[-1]) for row in found), "a failure is proved by a test"
