"""The shared contract of LoRA on DeepSpeed: ZeRO 0, 2 and 3, and two ranks."""

from __future__ import annotations

from typing import Any

import pytest
from arctic_rl.config import ArcticSkyRLConfig
from arctic_rl.entrypoint import PLUGIN
from skyrl.train.policy.contract_suite import FLOAT32
from skyrl.train.policy.lora_suite import LoraContract


class DeepSpeedLora(LoraContract):
    """The contract under `trainer.arctic_rl` = `arctic`."""

    plugin = PLUGIN
    arctic: dict[str, Any] = {}

    def config(self, tree: dict[str, Any]) -> Any:
        tree["trainer"]["arctic_rl"] = self.arctic
        return ArcticSkyRLConfig.model_validate(tree)


class TestZero0Lora(DeepSpeedLora):
    """In float64."""


@pytest.mark.long  # test_deepspeed_backend.py proves in CI that stage 2 steps as stage 0 and 3 do
class TestZero2Lora(DeepSpeedLora):
    arctic, dtype = {"zero_stage": 2}, FLOAT32


@pytest.mark.ci
class TestZero3Lora(DeepSpeedLora):
    arctic, dtype = {"zero_stage": 3}, FLOAT32
    # left to the class below: what the tests that remain imply, and what does not depend on the stage
    test_gradients_of_the_adapter_equal_the_plain_reference = None
    test_the_base_never_changes_and_the_adapter_does = None
    test_the_adapter_begins_as_nothing_and_is_drawn_from_the_runs_seed = None
    test_recomputed_activations_give_the_same_gradient = None
    test_target_modules_that_the_model_does_not_have_are_refused_and_its_own_listed = None
    test_only_target_modules_that_are_not_excluded_get_one = None


@pytest.mark.long
class TestZero3LoraWhole(DeepSpeedLora):
    arctic, dtype = {"zero_stage": 3}, FLOAT32


@pytest.mark.long  # FSDP proves in CI that ranks share one adapter
@pytest.mark.timeout(400)  # processes that start beside others
class TestTwoRanksLora(DeepSpeedLora):
    num_workers = 2
    # every test starts processes of its own; left out is what ranks cannot change
    test_recomputed_activations_give_the_same_gradient = None
    test_target_modules_that_the_model_does_not_have_are_refused_and_its_own_listed = None
    test_only_target_modules_that_are_not_excluded_get_one = None
