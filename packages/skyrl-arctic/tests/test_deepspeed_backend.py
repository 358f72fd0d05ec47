"""The shared backend contract on DeepSpeed, ZeRO 0 to 3, and what only this backend has to promise."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from arctic_rl.config import ArcticSkyRLConfig
from arctic_rl.entrypoint import PLUGIN
from skyrl.train.policy import contract_suite as suite
from skyrl.train.policy.plain_reference import PlainPolicy


class DeepSpeedContract(suite.PolicyContract):
    """The contract under `trainer.arctic_rl` = `arctic`."""

    plugin = PLUGIN
    arctic: dict[str, Any] = {}

    def config(self, tree: dict[str, Any]) -> Any:
        tree["trainer"]["arctic_rl"] = self.arctic
        return ArcticSkyRLConfig.model_validate(tree)


class TestZero0(DeepSpeedContract):
    """Both precisions."""


class PartitionedContract(DeepSpeedContract):
    """From stage 1 on DeepSpeed's optimizer is float32, so what the suite asks in float64 is asked in float32 here."""

    test_logprobs_equal_the_plain_reference_in_the_order_of_the_batch_in_float64 = None
    test_gradients_equal_the_plain_reference_in_float64 = None
    test_gradients_of_the_regular_loss_equal_the_plain_reference_in_float64 = None
    test_weights_after_five_steps_equal_the_plain_reference_in_float64 = None

    def test_gradients_of_the_regular_loss_equal_the_plain_reference_in_float32(self, tmp_path: Path) -> None:
        self._compare_gradients(tmp_path, suite.FLOAT32, loss="regular")

    def test_the_gradient_does_not_depend_on_the_size_of_micro_batches(self, tmp_path: Path) -> None:
        model, batch = suite.tiny_model(tmp_path), suite.scored(suite.random_minibatch(4))
        for micro, tokens in ((1, -1), (64, -1), (1, 40)):
            with self.group(model, micro=micro, tokens=tokens, reduction="sequence_mean") as (group, cfg):
                ours = group.gradients(batch, suite.spec(cfg))
            expected = PlainPolicy.load(model).gradients(batch, cfg.trainer.algorithm, suite.TEMPERATURE)
            suite.assert_same_gradients(ours, expected, suite.GRADIENT_TOLERANCE[suite.FLOAT32])

    def test_metrics_are_those_of_the_whole_minibatch(self, tmp_path: Path) -> None:
        model, batch = suite.tiny_model(tmp_path), suite.scored(suite.random_minibatch(5))
        with self.group(model, micro=3) as (group, cfg):
            metrics = group.update(batch, suite.spec(cfg))
        plain = PlainPolicy.load(model)
        algorithm, optimizer = cfg.trainer.algorithm, cfg.trainer.policy.optimizer_config
        norm = plain.adamw_step(plain.gradients(batch, algorithm, suite.TEMPERATURE), optimizer)
        assert math.isclose(metrics["policy/grad_norm"], norm, rel_tol=1e-5)
        assert norm > 2 * optimizer.max_grad_norm, "the norm is the one before clipping"

    def test_a_rank_without_sequences_takes_part_in_the_step(self, tmp_path: Path) -> None:
        model, batch = suite.tiny_model(tmp_path), suite.scored(suite.random_minibatch(6))
        one = batch.select([2])
        with self.group(model, micro=2) as (group, cfg):
            ours = group.gradients(one, suite.spec(cfg))
        expected = PlainPolicy.load(model).gradients(one, cfg.trainer.algorithm, suite.TEMPERATURE)
        suite.assert_same_gradients(ours, expected, suite.GRADIENT_TOLERANCE[suite.FLOAT32])

    def test_reading_gradients_before_a_step_does_not_change_the_step(self, tmp_path: Path) -> None:
        model, batch = suite.tiny_model(tmp_path), suite.scored(suite.random_minibatch(7))
        with self.group(model, micro=4) as (group, cfg):
            group.update(batch, suite.spec(cfg))
            expected = group.weights()
        with self.group(model, micro=4) as (group, cfg):
            group.gradients(batch, suite.spec(cfg))
            step(group)
            suite.assert_identical(group.weights(), expected)

    def test_float64_is_refused_with_the_key_to_change(self, tmp_path: Path) -> None:
        with (
            pytest.raises(ValueError, match=re.escape("trainer.arctic_rl.zero_stage=0")),
            self.group(suite.tiny_model(tmp_path), dtype=suite.FLOAT64),
        ):
            pass


@pytest.mark.ci
class TestZero1(PartitionedContract):
    arctic = {"zero_stage": 1}


@pytest.mark.ci
class TestZero2(PartitionedContract):
    arctic = {"zero_stage": 2}


@pytest.mark.ci
class TestZero3(PartitionedContract):
    arctic = {"zero_stage": 3}


def step(group: Any) -> tuple[float, float]:
    """One step of a group's only worker, without a new backward pass."""
    return group._workers._worker.backend.step()


@pytest.mark.ci
@pytest.mark.parametrize(
    "arctic",
    [
        {"zero_stage": 1, "offload_optimizer": True},
        {"zero_stage": 2, "offload_optimizer": True},
        {"zero_stage": 3, "offload_optimizer": True, "offload_param": True},
    ],
)
def test_offloading_changes_where_state_lies_and_nothing_else(arctic: dict[str, Any], tmp_path: Path) -> None:
    model = suite.tiny_model(tmp_path)
    batches = [suite.scored(suite.random_minibatch(30 + i)) for i in range(3)]
    found = []
    for settings in (arctic, {"zero_stage": arctic["zero_stage"]}):
        contract = DeepSpeedContract()
        contract.arctic = settings
        with contract.group(model, micro=5) as (group, cfg):
            for batch in batches:
                group.update(batch, suite.spec(cfg))
            found.append(group.weights())
            engine = group._workers._worker.backend.engine
            assert (engine.zero_offload_optimizer() is not None) == ("offload_optimizer" in settings)
    assert max(suite.largest_gap(found[0][name], found[1][name]) for name in found[1]) < 1e-6


def test_warm_up_can_be_a_share_of_all_steps(tmp_path: Path) -> None:
    contract = DeepSpeedContract()
    contract.arctic = {"lr_warmup_ratio": 0.1}
    batch = suite.scored(suite.random_minibatch(8))
    with contract.group(suite.tiny_model(tmp_path), micro=64) as (group, cfg):
        rates = [group.update(batch, suite.spec(cfg))["policy/policy_lr"] for _ in range(4)]
    assert rates == pytest.approx([0.0, 1.5e-4, 3e-4, 3e-4]), "0.1 of the group's 20 steps"


def test_a_block_of_logits_keeps_to_the_peak_memory(tmp_path: Path) -> None:
    from arctic_rl.policy.deepspeed_backend import block_of_positions

    worker = {"logits_optimization": "memory", "peak_logits_gib": 1.0}
    assert block_of_positions(worker, 1024)(100) == 1024
    assert block_of_positions(worker, 1024)(2**20) == 256
    assert block_of_positions({**worker, "logits_optimization": "none"}, 1024)(2**20) > 10**9


def test_a_reference_is_frozen_and_scores_like_the_policy(tmp_path: Path) -> None:
    from skyrl.train.policy.group import PolicyGroup

    model, batch = suite.tiny_model(tmp_path), suite.random_minibatch(1)
    tree = {"trainer": {"device": "cpu", "policy": {"model": {"path": str(model)}}}}
    reference = PolicyGroup.create(DeepSpeedContract().config(tree), PLUGIN, "ref")
    try:
        found = reference.logprobs(batch, temperature=suite.TEMPERATURE)
        backend = reference._workers._worker.backend
        assert not any(p.requires_grad for p in backend.model.parameters())
    finally:
        reference.close()
    expected, _ = PlainPolicy.load(model).logprobs(batch, suite.TEMPERATURE)
    assert suite.largest_gap(found, expected.detach()) < 2e-6


def test_nothing_is_compiled_and_no_port_is_opened(tmp_path: Path) -> None:
    with DeepSpeedContract().group(suite.tiny_model(tmp_path)):
        import deepspeed.ops

        assert deepspeed.ops.__compatible_ops__ == {}
        assert torch.distributed.get_backend() == "gloo"
