"""Every accepted recipe, made small, takes two real steps on both backends: a gradient, other weights, its own metrics."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import public_recipes
import pytest
import torch
from public_recipes import TINY_MODEL, recipes
from refusals import BOTH, told_to
from shrunk import SIZES, shrunk
from skyrl.train import backends
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl_rollout.reference.process import ReferenceServer
from test_recipes import arguments

pytestmark = pytest.mark.skipif(not public_recipes.FILE.is_file(), reason=public_recipes.ABSENT)
RECIPES = {recipe.name: recipe for recipe in recipes()}
ACCEPTED = [(name, backend) for name in RECIPES for backend in BOTH if not told_to(name, backend)]


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The model, the prompts and the server that all runs share."""
    data = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    rows = [
        {"prompt": [{"role": "user", "content": f"{a}+{a}="}], "env_class": "varied", "data_source": "sums"}
        for a in range(4)
    ]
    data.write_text("\n".join(map(json.dumps, rows)))
    with ReferenceServer("--model", str(TINY_MODEL), "--logits", "canary", "--delta") as server:
        yield {"model": str(TINY_MODEL), "data": str(data), "url": server.url}


class WatchedExp(BasePPOExp):
    """A run that remembers the policy's weights before its first and after its last step."""

    def get_trainer(self, **parts: Any) -> Any:
        policy, trainer = parts["policy"], super().get_trainer(**parts)
        self.before, train = policy.weights(), trainer.train

        async def watched() -> Any:
            result = await train()
            self.after = await asyncio.to_thread(policy.weights)
            return result

        trainer.train = watched
        return trainer


@pytest.mark.parametrize(("name", "backend"), ACCEPTED)
def test_a_shrunk_recipe_takes_two_steps(
    name: str, backend: str, home: Path, places: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    argv, parts = arguments(RECIPES[name], home, backend)
    cfg, plugin = backends.resolve(shrunk(argv, places | {"folder": str(tmp_path)}), parts, announce=lambda line: None)
    exp = WatchedExp(cfg, plugin)
    exp.run()
    log = (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, log) if "policy/grad_norm" in row]
    assert len(steps) == 2
    for row in steps:
        assert row["policy/grad_norm"] > 0 and math.isfinite(row["policy/grad_norm"])
    assert any(not torch.equal(exp.before[key], exp.after[key]) for key in exp.before)
