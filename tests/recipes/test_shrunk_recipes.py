"""An accepted recipe, made small, takes two real steps on both backends: a gradient, other weights, its metrics."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import public_recipes
import pytest
import torch
from own_metrics import BY_FLAG, EVALUATED, SIMULATED, expected
from public_recipes import TINY_MODEL, recipes
from refusals import BOTH, told_to
from shrunk import SIZES, shrunk
from skyrl.train import backends
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl_rollout.reference.process import ReferenceServer, ServedProcess
from test_recipes import arguments

pytestmark = pytest.mark.skipif(not public_recipes.FILE.is_file(), reason=public_recipes.ABSENT)
RECIPES = {recipe.name: recipe for recipe in recipes()}
NEEDS_THE_POLICYS_WORDS = (
    "trainer.algorithm.off_policy_correction.sequence_mask_metric=geometric", "generator.apply_overlong_filtering=true",
)  # fmt: skip
# A tenth of them, which has every loss, estimator, reduction and way of training.
REPRESENTATIVE = (
    ("train/algorithms/cispo/run_cispo_gsm8k", "own"),
    ("train/algorithms/clip_cov_kl_cov/run_clip_cov", "arctic_rl"),
    ("train/algorithms/custom_policy_loss/run_custom_policy_loss", "own"),
    ("train/algorithms/dapo/run_dapo_gsm8k", "arctic_rl"),
    ("train/algorithms/drgrpo/run_drgrpo_gsm8k", "own"),
    ("train/algorithms/gspo/run_gspo_gsm8k", "arctic_rl"),
    ("train/algorithms/maxrl/run_maxrl_gsm8k", "own"),
    ("train/algorithms/reinforce++/run_reinforce++", "arctic_rl"),
    ("train/algorithms/rloo/run_rloo", "own"),
    ("train/algorithms/sapo/run_sapo_gsm8k", "own"),
    ("train/on_policy_distillation/run_on_policy_distill_math_qwen3_1.7b", "arctic_rl"),
    ("train/ppo/run_ppo", "own"),
    ("train/fully_async/fully_async_run_gsm8k", "arctic_rl"),
    ("train/search/run_search", "own"),
    ("train/megatron/run_megatron_dapo_qwen3_4b_lora", "arctic_rl"),
    ("integrations/arctic_rl/examples/run_bird_grpo_smoke", "arctic_rl"),
)
ACCEPTED = [(name, backend) for name in RECIPES for backend in BOTH if not told_to(name, backend)]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts whose answers get rewards that differ, so that two samples carry an advantage."""
    file = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    rows = [
        {"prompt": [{"role": "user", "content": f"{a}+{a}="}], "env_class": "varied", "data_source": "sums"}
        for a in range(4)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


@pytest.fixture(scope="session")
def reference_url() -> Iterator[str]:
    with ReferenceServer("--model", str(TINY_MODEL), "--logits", "canary", "--delta") as server:
        yield server.url


@pytest.fixture(scope="session")
def model_url() -> Iterator[str]:
    """A server of the policy's own words, for what looks at them: a reference server would be masked out whole."""
    command = (sys.executable, "-m", "skyrl.serve", "--model", str(TINY_MODEL), "--listen", "127.0.0.1:0", "--delta")
    with ServedProcess([*command, "--max-model-len", "64"]) as server:
        yield server.url


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


def marked(name: str, backend: str) -> Any:
    """With the marker of its tier: every loss, estimator and way of training once, and the rest by hand."""
    chosen = (name, backend) in REPRESENTATIVE
    return pytest.param(name, backend, marks=pytest.mark.ci if chosen else pytest.mark.long)


@pytest.mark.parametrize(("name", "backend"), [marked(*pair) for pair in ACCEPTED])
def test_a_shrunk_recipe_takes_two_steps(
    name: str, backend: str, home: Path, data: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    argv, parts = arguments(RECIPES[name], home, backend)
    looks_at_words = any(argument in NEEDS_THE_POLICYS_WORDS for argument in argv)
    url = request.getfixturevalue("model_url" if looks_at_words else "reference_url")
    places = {"model": TINY_MODEL, "data": data, "folder": tmp_path, "url": url}
    cfg, plugin = backends.resolve(shrunk(argv, places), parts, announce=lambda line: None)
    exp = WatchedExp(cfg, plugin)
    exp.run()
    rows = list(map(json.loads, (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()))
    steps = [row for row in rows if "reward/avg_raw_reward" in row]
    trained = not cfg.trainer.fully_async.simulate_training
    assert len(steps) == 2
    for row in steps:
        assert not trained or row["policy/grad_norm"] > 0 and math.isfinite(row["policy/grad_norm"])
        assert expected(argv, BY_FLAG if trained else SIMULATED) - row.keys() == set()
    assert expected(argv, EVALUATED) - rows[0].keys() == set()
    assert any(not torch.equal(exp.before[key], exp.after[key]) for key in exp.before) is trained


@pytest.mark.parametrize(("name", "backend"), [marked(*pair) for pair in ACCEPTED])
def test_a_shrunk_recipe_differs_in_its_sizes_only(name: str, backend: str, home: Path) -> None:
    argv, parts = arguments(RECIPES[name], home, backend)
    places = {"model": TINY_MODEL, "data": "/d.jsonl", "folder": "/f", "url": "grpc://h:1"}
    whole, small = (
        dict(leaves(backends.resolve(each, parts, announce=lambda line: None)[0].model_dump()))
        for each in (argv, shrunk(argv, places))
    )
    assert {key for key in whole if whole[key] != small[key]} <= SIZES.keys()


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def test_every_family_of_recipes_has_one_that_runs_in_every_check() -> None:
    def families(names: Iterable[str]) -> set[str]:
        keys = ("trainer.algorithm.policy_loss_type", "trainer.algorithm.advantage_estimator",
                "trainer.algorithm.loss_reduction", "generator.step_wise_trajectories", "trainer.fully_async.enabled",
                "trainer.algorithm.dynamic_sampling.type")  # fmt: skip
        given = {a for name in names for a in RECIPES[name].overrides if a.split("=")[0] in keys}
        return {a for a in given if not a.endswith(("=null", "=false", "=token_mean", "=regular"))}

    assert set(REPRESENTATIVE) <= set(ACCEPTED)
    assert families(name for name, _ in REPRESENTATIVE) == families(name for name, _ in ACCEPTED)
