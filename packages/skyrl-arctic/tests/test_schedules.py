"""Every schedule gives both backends the rates of its formula; what no backend does between steps is listed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from arctic_rl.config import ArcticSkyRLConfig
from arctic_rl.entrypoint import PLUGIN as ARCTIC
from skyrl.train.config.schedules import SCHEDULES
from skyrl.train.policy import contract_suite as suite
from skyrl.train.policy.fsdp.plugin import PLUGIN as FSDP
from skyrl.train.policy.group import PolicyGroup

STEPS, WARMUP, TOTAL, RATE = 10, 3, 12, 1e-3


def through(step: int) -> float:
    """The share of the steps after the warm-up."""
    return (step - WARMUP) / (TOTAL - WARMUP)


# After the warm-up, which rises from 0 by a third of the rate in each step.
AFTER: dict[str, Callable[[int], float]] = {
    "constant_with_warmup": lambda step: 1.0,
    "linear": lambda step: 1 - through(step),
    "cosine": lambda step: (1 + math.cos(math.pi * through(step))) / 2,
    "cosine_with_restarts": lambda step: (1 + math.cos(math.pi * through(step))) / 2,  # one cycle
    "polynomial": lambda step: (1 - 1e-7 / RATE) * (1 - through(step)) + 1e-7 / RATE,
    "inverse_sqrt": lambda step: math.sqrt(WARMUP / step),
}


def expected(name: str) -> list[float]:
    if name == "constant":
        return [RATE] * STEPS
    return [RATE * (step / WARMUP if step < WARMUP else AFTER[name](step)) for step in range(STEPS)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return suite.tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", SCHEDULES)
def test_both_backends_take_the_rates_of_the_formula(name: str, model: Path) -> None:
    batch = suite.scored(suite.random_minibatch(1, num_prompts=1, num_samples=2))
    optimizer = {"lr": RATE, "scheduler": name, "num_warmup_steps": WARMUP}
    trainer = {"device": "cpu", "policy": {"model": {"path": str(model)}, "optimizer_config": optimizer}}
    cfg = ArcticSkyRLConfig.model_validate({"trainer": trainer})
    for plugin in (FSDP, ARCTIC):
        group = PolicyGroup.create(cfg, plugin, "policy", total_steps=TOTAL)
        try:
            rates = [group.update(batch, suite.spec(cfg))["policy/policy_lr"] for _ in range(STEPS)]
        finally:
            group.close()
        assert rates == pytest.approx(expected(name), rel=1e-12, abs=1e-18), plugin.name


@pytest.mark.parametrize("plugin", [FSDP, ARCTIC], ids=lambda plugin: plugin.name)
def test_offloading_between_steps_is_listed_as_unused(plugin: suite.BackendPlugin) -> None:
    key = "trainer.policy.optimizer_config.offload_after_step"
    assert plugin.report is not None
    found = plugin.report(ArcticSkyRLConfig(), (key,))
    assert list(found.unused) == [key] and not found.honoured
