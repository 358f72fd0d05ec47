"""Every key of a public recipe has a test that shows what it changes, or stands among those that decide nothing."""

from __future__ import annotations

import ast
from functools import cache

import public_recipes
import pytest
import test_algorithm_keys
from key_effects import EFFECTS
from key_proofs import PROOFS, SHOWN_BY_A_GPU
from public_recipes import ROOT, recipes
from skyrl.train import backends
from skyrl.train.config import absent, inert

pytestmark = pytest.mark.skipif(not public_recipes.FILE.is_file(), reason=public_recipes.ABSENT)
KEYS = sorted({argument.partition("=")[0] for recipe in recipes() for argument in recipe.overrides})
ALGORITHM = {f"trainer.algorithm.{name}" for name in (*test_algorithm_keys.CASES, *test_algorithm_keys.ELSEWHERE)}


@cache
def functions_of(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def is_settled(key: str) -> bool:
    """Whether a table says what the key, or the free mapping that it lies in, comes to."""
    parts = key.split(".")
    sections = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    decides_nothing = inert.why_inert(key) is not None or key in inert.ALWAYS
    of_an_example = absent.example_key(tuple(parts)) is not None
    proved = PROOFS.keys() | EFFECTS.keys() | ALGORITHM
    return decides_nothing or of_an_example or key in SHOWN_BY_A_GPU or bool(sections & proved)


@pytest.mark.parametrize("key", KEYS)
def test_a_key_has_a_test_of_its_effect_or_a_reason_why_it_has_none(key: str) -> None:
    assert is_settled(key)


def test_every_proof_is_a_test_that_exists() -> None:
    proofs = {proof.partition("::")[::2] for proof in PROOFS.values()}
    assert [f"{file}::{name}" for file, name in proofs if name not in functions_of(file)] == []


@pytest.mark.parametrize("key", SHOWN_BY_A_GPU)
def test_a_key_that_only_a_gpu_shows_is_listed_as_unused_without_one(key: str) -> None:
    lines: list[str] = []
    backends.resolve([f"{key}=true", "trainer.device=cpu"], announce=lines.append)
    assert f"  unused: {key}: {SHOWN_BY_A_GPU[key]}" in lines


def test_no_key_is_both_inert_and_proved() -> None:
    assert [key for key in (*PROOFS, *EFFECTS) if inert.why_inert(key) is not None] == []
