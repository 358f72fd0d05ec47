"""LoRA on the FSDP backend: its contract on one rank in this process and on two under Ray, and on the critic."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.policy.contract_suite import assert_identical, random_minibatch, spec, tiny_model
from skyrl.train.policy.critic import CriticGroup
from skyrl.train.policy.critic_suite import HEAD, taught, tiny_critic
from skyrl.train.policy.fsdp.plugin import PLUGIN
from skyrl.train.policy.lora_suite import PREFIX, RANK, LoraContract


class TestFsdpOnOneRank(LoraContract):
    plugin = PLUGIN

    def test_each_way_of_drawing_begins_with_other_factors_and_the_same_policy(self, tmp_path: Path) -> None:
        """kaiming draws A evenly below 1 / sqrt(inputs), gaussian from a normal of 1 / rank; orthogonal draws B too."""
        model, name = tiny_model(tmp_path), f"{PREFIX}model.layers.0.self_attn.q_proj"
        drawn = {}
        for method in ("kaiming", "gaussian", "orthogonal"):
            with self.group(model, init_method=method) as (group, _cfg):
                weights = group.weights()
                drawn[method] = [weights[f"{name}.lora_{side}.weight"] for side in "AB"]
        bound = drawn["kaiming"][0].shape[1] ** -0.5
        assert float(drawn["kaiming"][0].abs().max()) <= bound
        assert float(drawn["gaussian"][0].std()) == pytest.approx(1 / RANK, rel=0.25)
        assert float(drawn["gaussian"][0].abs().max()) > 2 * bound
        assert {method: bool(b.any()) for method, (_a, b) in drawn.items()} == {
            "kaiming": False, "gaussian": False, "orthogonal": True,
        }  # fmt: skip
        for a, b in drawn.values():
            assert a.any() and float((b @ a).abs().max()) < 1e-6


class TwoRanks(LoraContract):
    plugin = PLUGIN
    num_workers = 2
    # every test starts processes of its own; left out is what ranks cannot change
    test_recomputed_activations_give_the_same_gradient = None
    test_target_modules_that_the_model_does_not_have_are_refused_and_its_own_listed = None
    test_only_target_modules_that_are_not_excluded_get_one = None


@pytest.mark.ci
@pytest.mark.timeout(400)  # processes that start beside others
class TestFsdpOnTwoRanks(TwoRanks):
    # the class below, run by hand, has the others: each starts two processes and more for a minute
    test_gradients_of_the_adapter_equal_the_plain_reference = None
    test_the_base_never_changes_and_the_adapter_does = None
    test_the_adapter_begins_as_nothing_and_is_drawn_from_the_runs_seed = None
    test_a_resumed_run_continues_bit_for_bit_from_the_adapter_alone = None
    test_the_export_loads_in_peft_and_merged_in_transformers_and_both_are_the_policy = None


@pytest.mark.long
@pytest.mark.timeout(400)
class TestFsdpOnTwoRanksWhole(TwoRanks):
    """By hand."""


def test_a_critic_with_an_adapter_trains_it_and_its_head_and_nothing_else(tmp_path: Path) -> None:
    model, batch = tiny_critic(tmp_path / "model"), taught(random_minibatch(5))
    stored = load_file(model / "model.safetensors")
    critic = {"model": {"path": str(model), "lora": {"rank": 4}}, "optimizer_config": {"lr": 1e-2}}
    trainer = {"device": "cpu", "critic": critic, "algorithm": {"advantage_estimator": "gae"}}
    cfg = SkyRLTrainConfig.model_validate({"trainer": trainer})

    def start() -> CriticGroup:
        return CriticGroup.create(cfg, PLUGIN, "critic", total_steps=4)

    first = start()
    try:
        for _ in range(2):
            assert first.update(batch, spec(cfg))["critic/grad_norm"] > 0
        weights, values = first.weights(), first.values(batch)
        first.save(tmp_path / "saved")
        first.save_hf(tmp_path / "export")
    finally:
        first.close()
    frozen = {name: t for name, t in weights.items() if not name.startswith(PREFIX) and name != HEAD}
    assert_identical(frozen, {name: stored[name] for name in frozen})
    assert not weights[HEAD].equal(stored[HEAD]) and len(weights) > len(frozen) + 1
    second = start()
    try:
        second.load(tmp_path / "saved")
        assert_identical(second.weights(), weights)
    finally:
        second.close()
    merged = SkyRLTrainConfig.model_validate(
        {"trainer": trainer | {"critic": {"model": {"path": str(tmp_path / "export")}}}}
    )
    third = CriticGroup.create(merged, PLUGIN, "critic", total_steps=4)
    try:
        assert float((third.values(batch) - values).abs().max()) < 1e-5
    finally:
        third.close()
