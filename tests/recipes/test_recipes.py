"""Every public recipe is accepted under its own backend and with one flag added, or refused as the table says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import own_scripts
import public_recipes
import pytest
from public_recipes import Recipe, recipes
from refusals import ARCTIC, BOTH, OWN, REFUSALS, told_to
from skyrl.train import backends
from skyrl.train.config.problems import ConfigError
from skyrl.train.entrypoints import public_names

pytestmark = pytest.mark.skipif(not public_recipes.FILE.is_file(), reason=public_recipes.ABSENT)
RECIPES = {recipe.name: recipe for recipe in recipes()}


def arguments(recipe: Recipe, home: Path, backend: str) -> tuple[list[str], Mapping[str, type]]:
    """What the recipe's script gives to this package, and the sections that its own entrypoint adds."""
    module = public_names.module_name(recipe.entrypoint)
    named = [f"{public_names.KEY}={module}"] if module in public_names.PUBLIC_ENTRYPOINTS else []
    flag = [f"{backends.BACKEND}={ARCTIC}"] if backend == ARCTIC else []
    return [*named, *recipe.argv(home), *flag], own_scripts.PARTS.get(module, {})


def answer(recipe: Recipe, home: Path, backend: str) -> tuple[tuple[str, ...], list[str]]:
    """(the problems, sorted; what the start says of each key)."""
    argv, parts = arguments(recipe, home, backend)
    lines: list[str] = []
    try:
        backends.resolve(argv, parts, announce=lines.append)
    except ConfigError as error:
        return tuple(sorted(error.problems)), lines
    return (), lines


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_accepted_or_refused_with_the_message_of_the_table(name: str, backend: str, home: Path) -> None:
    """And of an accepted one every key is accounted for."""
    problems, lines = answer(RECIPES[name], home, backend)
    assert problems == told_to(name, backend)
    for argument in () if problems else RECIPES[name].overrides:
        key = argument.partition("=")[0]
        assert any(key in line for line in lines[1:]), key


def test_every_row_of_the_table_names_recipes_and_says_why() -> None:
    for row in REFUSALS:
        assert row.why and row.recipes
        assert set(row.recipes) <= RECIPES.keys()


def test_the_flips_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """How many recipes run as they stand, and how many with the one flag, FSDP and Megatron apart."""
    total = Counter(recipe.strategy for recipe in RECIPES.values())
    assert total == {"fsdp": 50, "megatron": 23}
    accepted = Counter(
        (recipe.strategy, backend) for name, recipe in RECIPES.items() for backend in BOTH if not told_to(name, backend)
    )
    with capsys.disabled():
        for strategy, count in total.items():
            own, flipped = accepted[strategy, OWN], accepted[strategy, ARCTIC]
            print(f"\n{strategy}: {own} of {count} recipes run as they stand, {flipped} with trainer.backend={ARCTIC}")
