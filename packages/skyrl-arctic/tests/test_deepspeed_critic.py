"""The critic's shared contract on DeepSpeed, ZeRO 0 to 3 and two ranks, and what in its settings is its own."""

from __future__ import annotations

from typing import Any

import pytest
from arctic_rl.client_config import build_rl_config, of_the_critic
from arctic_rl.config import ArcticSkyRLConfig
from arctic_rl.entrypoint import PLUGIN
from skyrl.train.policy.contract_suite import FLOAT32
from skyrl.train.policy.critic_suite import CriticContract


class DeepSpeedCritic(CriticContract):
    """The contract under `trainer.arctic_rl` = `arctic`."""

    plugin = PLUGIN
    arctic: dict[str, Any] = {}

    def config(self, tree: dict[str, Any]) -> Any:
        tree["trainer"]["arctic_rl"] = self.arctic
        return ArcticSkyRLConfig.model_validate(tree)


@pytest.mark.ci
class TestZero0Critic(DeepSpeedCritic):
    """In float64."""


@pytest.mark.long
class TestZero2Critic(DeepSpeedCritic):
    arctic, dtype = {"zero_stage": 2}, FLOAT32


@pytest.mark.long
class TestZero3Critic(DeepSpeedCritic):
    arctic, dtype = {"zero_stage": 3}, FLOAT32


@pytest.mark.ci
@pytest.mark.timeout(400)  # processes that start beside others
class TestZero1CriticOnTwoRanks(DeepSpeedCritic):
    arctic, dtype, num_workers = {"zero_stage": 1}, FLOAT32, 2
    # every test starts processes of its own; left out is what other tests of this file imply
    test_a_rank_without_sequences_takes_part_in_the_critics_step = None
    test_values_and_gradients_equal_the_plain_reference_for_any_micro_batches = None
    test_a_critics_gradient_that_is_not_finite_changes_nothing_and_is_counted = None
    test_a_resumed_critic_continues_bit_for_bit = None
    test_an_exported_critic_is_a_model_that_a_critic_starts_from = None


def config(critic: dict[str, Any], **arctic: Any) -> Any:
    return ArcticSkyRLConfig.model_validate({"trainer": {"arctic_rl": arctic, "critic": critic}})


def test_the_critics_engine_is_derived_from_the_critics_own_keys() -> None:
    cfg = config({"model": {"path": "a/critic"}, "optimizer_config": {"max_grad_norm": 0.25, "lr": 7e-6}})
    own = build_rl_config(of_the_critic(cfg), device="cpu", world_size=1)
    policy = build_rl_config(cfg, device="cpu", world_size=1)
    assert own.ds_worker_config["model_path"] == "a/critic" != policy.ds_worker_config["model_path"]
    assert own.training_config["optimizer"]["lr"] == 7e-6
    assert (
        own.training_config["optimizer"]["max_grad_norm"]
        == 0.25
        != policy.training_config["optimizer"]["max_grad_norm"]
    )


def test_two_names_of_the_critics_warm_up_are_refused() -> None:
    cfg = config({"model": {"path": "a/b"}, "optimizer_config": {"num_warmup_steps": 3}}, lr_warmup_ratio=0.1)
    with pytest.raises(ValueError, match=r"trainer\.critic\.optimizer_config\.num_warmup_steps=3"):
        of_the_critic(cfg)
