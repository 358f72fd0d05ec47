"""Rewards climb also where rollouts are made ahead of training: the tiny model, `skyrl-serve`, 60 steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from training_run import ROOT, TrainingRun, mean

EXAMPLES = ROOT / "packages/skyrl-core/examples"
ASYNC = (f"@{EXAMPLES / 'fully_async.yaml'}",)
ONE_STEP_OFF = ("trainer.mode=one_step_off", "generator.inference_engine.backend=transformers")
ADAPTER = (
    "trainer.policy.model.lora.rank=16",
    "trainer.policy.model.lora.alpha=32",
    "trainer.policy.optimizer_config.lr=1e-3",  # at 3e-3, good for fresh rollouts, it climbs to 0.68 and falls again
)
MODES = {
    "fully_async": ASYNC,
    "one_step_off": ONE_STEP_OFF,
    "fully_async, lora": (*ASYNC, *ADAPTER),
    "one_step_off, lora": (*ONE_STEP_OFF, *ADAPTER),
}


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", list(MODES))
def test_rollouts_ahead_of_training_lift_the_reward(tmp_path: Path, mode: str) -> None:
    run = TrainingRun(
        tmp_path, *MODES[mode], "trainer.max_training_steps=60", "trainer.eval_interval=0",
        "trainer.hf_save_interval=0", "generator.eval_sampling_params.temperature=1.0",
        "generator.eval_n_samples_per_prompt=6",
    ).run(timeout_s=1100)  # fmt: skip
    before = run.metrics()[0]["eval/all/avg_score"]  # 600 samples at temperature 1
    rewards = run.rewards()
    assert len(rewards) == 60
    assert mean(rewards[-10:]) >= before + 0.2, f"before {before:.3f}, last ten {mean(rewards[-10:]):.3f}"
    if mode.startswith("fully_async"):
        stale = [row["async/staleness_max"] for row in run.steps().values()]
        assert 0 < max(stale) <= 2
