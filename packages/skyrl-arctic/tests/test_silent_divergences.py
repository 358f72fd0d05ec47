"""Settings that the public integration reads and drops: here each one changes what is computed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from arctic_rl.generator import ArcticGenerator
from arctic_rl.trainer import ArcticPPOTrainer
from skyrl.train.generator.env_generator import EnvGenerator
from skyrl.train.policy import contract_suite as suite
from skyrl.train.policy.contract import LossSpec
from skyrl.train.trainer import RayPPOTrainer, minibatches
from test_deepspeed_backend import DeepSpeedContract


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return suite.tiny_model(tmp_path_factory.mktemp("model"))


def gradients(model: Path, batch: Any, *, temperature: float = suite.TEMPERATURE, **algorithm: Any) -> Any:
    with DeepSpeedContract().group(model, dtype=suite.FLOAT64, micro=5) as (group, cfg):
        changed = cfg.trainer.algorithm.model_copy(update=algorithm)
        return group.gradients(batch, LossSpec(algorithm=changed, temperature=temperature))


def differ(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return max(suite.largest_gap(a[name], b[name]) for name in a) > 1e-6


@pytest.mark.parametrize(
    "changed",
    [
        {"eps_clip_low": 0.01},
        {"eps_clip_high": 0.01},
        {"clip_ratio_c": 1.1},
        {"policy_loss_type": "regular"},
        {"policy_loss_type": "gspo"},
        {"policy_loss_type": "clip_cov"},
        {"loss_reduction": "token_mean_legacy"},
        {"advantage_batch_normalize": True},
        {"loss_reduction": "sequence_mean"},
        {"use_entropy_loss": False},
        {"entropy_loss_coef": 0.5},
        {"use_kl_loss": False},
        {"kl_loss_coef": 0.5},
        {"kl_estimator_type": "k2"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_the_setting_of_the_algorithm_changes_the_gradient(model: Path, changed: dict[str, Any]) -> None:
    batch = suite.scored(suite.random_minibatch(2))
    assert differ(gradients(model, batch, **changed), gradients(model, batch))


def test_masked_tokens_take_no_part_in_the_gradient(model: Path) -> None:
    batch = suite.scored(suite.random_minibatch(2))
    elsewhere_T = torch.where(batch.loss_mask_T == 0, torch.full_like(batch.advantages_T, 100.0), batch.advantages_T)
    assert not differ(gradients(model, batch.with_tensors(advantages_T=elsewhere_T)), gradients(model, batch))
    unmasked = batch.with_tensors(
        loss_mask_T=torch.ones_like(batch.loss_mask_T), old_logprobs_T=batch.old_logprobs_T.nan_to_num(-3.0)
    )
    assert differ(gradients(model, unmasked), gradients(model, batch))


def test_old_logprobs_use_the_temperature_so_the_first_ratio_is_one(model: Path) -> None:
    batch = suite.scored(suite.random_minibatch(3))
    with DeepSpeedContract().group(model, dtype=suite.FLOAT64) as (group, cfg):
        old_T = group.logprobs(batch, temperature=suite.TEMPERATURE)
        tight = cfg.trainer.algorithm.model_copy(update={"eps_clip_low": 1e-6, "eps_clip_high": 1e-6})
        spec = LossSpec(algorithm=tight, temperature=suite.TEMPERATURE)
        metrics = group.update(batch.with_tensors(old_logprobs_T=old_T.float().double()), spec)
        assert suite.largest_gap(old_T, group.logprobs(batch, temperature=1.0)) > 0.01
    assert metrics["policy/loss_metrics/clip_ratio"] == 0


@pytest.mark.parametrize(
    ("key", "value"), [("adam_betas", [0.5, 0.6]), ("weight_decay", 0.5), ("lr", 1e-4), ("max_grad_norm", 0.01)]
)
def test_the_setting_of_the_optimizer_changes_the_weights(model: Path, key: str, value: Any) -> None:
    class WithOther(DeepSpeedContract):
        def config(self, tree: dict[str, Any]) -> Any:
            tree["trainer"]["policy"]["optimizer_config"][key] = value
            return super().config(tree)

    found = []
    for contract in (DeepSpeedContract(), WithOther()):
        with contract.group(model, dtype=suite.FLOAT64, micro=64) as (group, cfg):
            for i in range(3):
                group.update(suite.scored(suite.random_minibatch(40 + i)), suite.spec(cfg))
            found.append(group.weights())
    assert max(suite.largest_gap(found[0][name], found[1][name]) for name in found[0]) > 1e-7


@pytest.mark.parametrize("scheduler", ["linear", "cosine"])
def test_the_scheduler_decides_the_learning_rate_over_the_real_horizon(model: Path, scheduler: str) -> None:
    class Scheduled(DeepSpeedContract):
        arctic = {"lr_scheduler_type": scheduler}

    batch = suite.scored(suite.random_minibatch(8))
    with Scheduled().group(model, micro=64) as (group, cfg):
        rates = [group.update(batch, suite.spec(cfg))["policy/policy_lr"] for _ in range(20)]
    share = 19 / 20  # the twentieth of the group's 20 steps
    expected = 1 - share if scheduler == "linear" else 0.5 * (1 + math.cos(math.pi * share))
    assert rates[0] == pytest.approx(3e-4)
    assert rates[-1] == pytest.approx(3e-4 * expected)


def test_a_batch_is_cut_into_one_optimizer_step_per_minibatch(model: Path) -> None:
    batch = suite.scored(suite.random_minibatch(5))
    with DeepSpeedContract().group(model, micro=5) as (group, cfg):
        cuts = minibatches(batch, 2)
        for cut in cuts:
            group.update(cut, suite.spec(cfg))
        assert len(cuts) == group._workers._worker.backend.engine.global_steps == 2


def test_micro_batches_need_not_hold_whole_groups(model: Path) -> None:
    """Groups of 3 in micro-batches of 2 and of 7."""
    batch = suite.scored(suite.random_minibatch(6))
    found = []
    for micro in (2, 7):
        with DeepSpeedContract().group(model, dtype=suite.FLOAT64, micro=micro) as (group, cfg):
            found.append(group.gradients(batch, suite.spec(cfg)))
    suite.assert_same_gradients(found[0], found[1], 1e-12)


def test_loop_and_generator_are_the_core_s_own_so_nothing_of_theirs_is_lost() -> None:
    for ours, core in ((ArcticPPOTrainer, RayPPOTrainer), (ArcticGenerator, EnvGenerator)):
        assert issubclass(ours, core)
        changed = {name for name in vars(ours) if callable(vars(ours)[name])}
        assert not changed, f"{ours.__name__} replaces {changed}: cover what it does by tests of its own"
