"""Whole small runs against the reference server: what the loop does with each part of an algorithm."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import skyrl.train.quickstart
from skyrl.train import backends, environments
from skyrl.train.algorithms.policy_losses import POLICY_LOSSES
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

pytestmark = pytest.mark.ci
QUICKSTART = Path(skyrl.train.quickstart.__file__).parent
A = "trainer.algorithm"


class ParityEnv(BaseTextEnv):
    """Reward 1 where the codes of the answer's characters add up to an even number; 3 for prompts that begin with 1."""

    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        super().__init__()

    def init(self, prompt: Any) -> Any:
        self.always = prompt[-1]["content"].startswith("1")
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reward = 3.0 if self.always else float(sum(map(ord, action)) % 2 == 0)
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})


environments.register("parity_of_a_test", ParityEnv)


@pytest.fixture
def run(reference_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The metrics of each step of a small run with these overrides."""
    monkeypatch.chdir(tmp_path)

    def start(*overrides: str) -> list[dict[str, float]]:
        cfg, plugin = backends.resolve(
            [
                f"@{QUICKSTART / 'embedded.yaml'}", f"generator.inference_engine.external_server_urls={reference_url}",
                "environment.env_class=parity_of_a_test", "generator.n_samples_per_prompt=4",
                "trainer.train_batch_size=8", "trainer.policy_mini_batch_size=4", "trainer.max_training_steps=2",
                "trainer.eval_before_train=false", "trainer.eval_interval=0", "trainer.ckpt_interval=0",
                "trainer.hf_save_interval=0", "trainer.logger=jsonl", "trainer.progress=false", *overrides,
            ],
            announce=lambda line: None,
        )  # fmt: skip
        BasePPOExp(cfg, plugin).run()
        log = cfg.trainer.log_folder / "metrics.jsonl"
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        log.unlink()
        return rows

    return start


@pytest.mark.parametrize("loss", list(POLICY_LOSSES))
def test_a_run_takes_a_step_along_every_loss(run: Any, loss: str) -> None:
    wide = (f"{A}.eps_clip_low=1.0", f"{A}.eps_clip_high=1e9")  # the reference server's logprobs are not the policy's
    (row,) = run(f"{A}.policy_loss_type={loss}", "trainer.max_training_steps=1", *wide)
    assert row["policy/grad_norm"] > 0 and math.isfinite(row["policy/grad_norm"])
    assert row["policy/num_skipped_updates"] == 0
    name = "importance_ratio" if loss == "importance_sampling" else "clip_ratio"
    assert f"policy/loss_metrics/{name}" in row
    unscored = loss in ("rollout_is", "dppo")
    assert ("policy/rollout_train_logprobs_abs_diff_mean" in row) is not unscored
    gap = {what: row.get(f"policy/minibatch_rollout_logprobs_abs_diff_{what}") for what in ("min", "mean", "max")}
    assert 0 <= gap["min"] < gap["mean"] < gap["max"] if unscored else set(gap.values()) == {None}


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "maxrl", "reinforce++"])
def test_a_run_takes_a_step_with_every_estimator(run: Any, estimator: str) -> None:
    (row,) = run(f"{A}.advantage_estimator={estimator}", "trainer.max_training_steps=1")
    assert row["policy/grad_norm"] > 0 and row["loss/avg_raw_advantages_abs"] > 0


def test_the_kl_leaves_the_reward_and_its_coefficient_follows_it_over_a_resume(run: Any) -> None:
    keys = (
        f"{A}.use_kl_loss=false", f"{A}.use_kl_in_reward=true", f"{A}.kl_loss_coef=10.0", f"{A}.kl_estimator_type=k2",
        f"{A}.kl_ctrl.type=adaptive", f"{A}.kl_ctrl.kl_target=1e-9", f"{A}.kl_ctrl.horizon=64",
        "trainer.policy.optimizer_config.lr=3e-3", "generator.sampling_params.temperature=0.7",
    )  # fmt: skip
    rows = run(*keys, "trainer.max_training_steps=4", "trainer.run_name=straight")
    # 32 samples: a tenth up while the KL is above the target, a tenth down while it is below
    for before, after in pairwise(rows):
        factor = after["loss/kl_loss_coef"] / before["loss/kl_loss_coef"]
        assert factor == pytest.approx(1.1 if before["loss/avg_kl"] > 2e-9 else 0.9)
    # both are scored at the same temperature, so that they are the same before the first update
    assert rows[0]["loss/kl_loss_coef"] == 10.0 and rows[0]["loss/avg_kl"] == 0.0
    moved = rows[-1]
    assert moved["loss/avg_kl"] > 0 and moved["loss/avg_final_rewards"] < moved["reward/avg_raw_reward"] - 1e-6

    run(*keys, "trainer.ckpt_interval=2")
    resumed = run(*keys, "trainer.max_training_steps=4", "trainer.resume_mode=latest")
    assert [row["loss/kl_loss_coef"] for row in resumed] == [row["loss/kl_loss_coef"] for row in rows[2:]]
    fixed = (*keys, f"{A}.kl_ctrl.type=fixed", f"{A}.kl_loss_coef=3.0", "trainer.max_training_steps=3")
    (changed,) = run(*fixed, "trainer.resume_mode=latest")
    assert changed["loss/kl_loss_coef"] == 3.0, (
        "a coefficient that does not move is the configuration's, not the file's"
    )


def test_groups_without_a_difference_leave_the_loss(run: Any) -> None:
    (plain,) = run("trainer.max_training_steps=1", "trainer.run_name=plain")
    (row,) = run("trainer.max_training_steps=1", f"{A}.zero_variance_filter=true")
    assert row["reward/num_zero_variance_filtered"] > 0
    # their advantages are 0, so that only the divisor of the mean changes
    assert row["policy/policy_entropy"] != plain["policy/policy_entropy"]
    assert row["policy/grad_norm"] > plain["policy/grad_norm"]
    assert row["reward/avg_raw_reward"] == plain["reward/avg_raw_reward"]


def test_overlong_responses_cost_reward_and_filtered_ones_leave_the_loss(run: Any) -> None:
    (row,) = run(
        f"{A}.overlong_buffer_len=3", f"{A}.overlong_buffer_penalty_factor=2.0", "trainer.max_training_steps=1"
    )
    # each response has 3 to 6 tokens, and 6 are the limit
    assert row["generate/min_num_tokens"] >= 3
    penalty = 2.0 * (row["generate/avg_num_tokens"] - 3) / 3
    assert row["reward/avg_overlong_penalty"] == pytest.approx(penalty) and penalty > 1
    assert row["loss/avg_final_rewards"] == pytest.approx(row["reward/avg_raw_reward"] - penalty)
    (filtered,) = run("generator.apply_overlong_filtering=true", "trainer.max_training_steps=1")
    assert filtered["policy/policy_entropy"] != row["policy/policy_entropy"]


def test_a_correction_is_reported_and_changes_the_step(run: Any) -> None:
    (plain,) = run("trainer.max_training_steps=1", "trainer.run_name=plain")
    (row,) = run("trainer.max_training_steps=1", f"{A}.off_policy_correction.tis_ratio_type=token")
    assert row["policy/grad_norm"] != plain["policy/grad_norm"]
    assert 0 < row["policy/loss_metrics/tis_token_clip_high_ratio"] < 1
    assert row["policy/loss_metrics/is_ratio_max"] > 2.0
