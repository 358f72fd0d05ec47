"""Rules of `trainer.mode` and of step-wise trajectories, each with the message that it gives."""

from __future__ import annotations

import pytest
from skyrl.train.algorithms.policy_losses import POLICY_LOSSES, register_policy_loss
from skyrl.train.backends import resolve
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.config.build import build
from skyrl.train.config.overrides import parse
from skyrl.train.config.problems import ConfigError
from skyrl.train.config.validation import validate

ASYNC = (
    "trainer.fully_async.enabled=true trainer.train_batch_size=8 trainer.policy_mini_batch_size=8 "
    "trainer.fully_async.num_parallel_generation_workers=16"
)
RIGHT = f"{ASYNC} trainer.algorithm.policy_loss_type=rollout_is"
STEPS = "generator.step_wise_trajectories=true"


def check(argv: str) -> SkyRLTrainConfig:
    cfg = build(SkyRLTrainConfig, parse(argv.split())).cfg
    validate(cfg)
    return cfg


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (
            f"{RIGHT} trainer.mode=one_step_off",
            "trainer.fully_async.enabled=true contradicts trainer.mode=one_step_off",
        ),
        (
            f"{RIGHT} trainer.placement.colocate_all=true",
            "trainer.placement.colocate_all=true does not go with trainer.mode=fully_async",
        ),
        (
            "trainer.mode=one_step_off trainer.placement.colocate_all=true",
            "trainer.placement.colocate_all=true does not go with trainer.mode=one_step_off",
        ),
        ("trainer.mode=generate data.val_data=[]", "trainer.mode=generate rolls out data.val_data, which is empty"),
        (f"{RIGHT} trainer.train_batch_size=16", "must equal trainer.policy_mini_batch_size=8"),
        (
            f"{RIGHT} trainer.fully_async.num_parallel_generation_workers=7",
            "trainer.fully_async.num_parallel_generation_workers=7: expected 8 to 40",
        ),
        (
            f"{RIGHT} trainer.fully_async.max_staleness_steps=0",
            "trainer.fully_async.num_parallel_generation_workers=16: expected 8 to 8",
        ),
        (
            f"{RIGHT} trainer.algorithm.dynamic_sampling.type=filter",
            "trainer.algorithm.dynamic_sampling.type=filter samples whole batches",
        ),
        (
            f"{RIGHT} trainer.fully_async.sample_full_batch=true",
            "trainer.fully_async.sample_full_batch=true needs trainer.algorithm.zero_variance_filter=true",
        ),
        (ASYNC, "trainer.algorithm.policy_loss_type=regular takes every sample for the policy's own"),
        (
            f"{ASYNC} trainer.algorithm.policy_loss_type=cispo",
            "trainer.algorithm.policy_loss_type=cispo takes every sample for the policy's own",
        ),
        ("generator.merge_stepwise_output=true", f"generator.merge_stepwise_output=true needs {STEPS}"),
        (
            f"{STEPS} trainer.algorithm.advantage_estimator=reinforce++",
            "trainer.algorithm.advantage_estimator=reinforce++ follows rewards from token to token",
        ),
        (
            f"{STEPS} trainer.algorithm.advantage_estimator=gae",
            "trainer.algorithm.advantage_estimator=gae follows rewards from token to token",
        ),
        (
            f"{STEPS} trainer.algorithm.loss_reduction=token_mean_legacy",
            "trainer.algorithm.loss_reduction=token_mean_legacy depends on how a batch is cut",
        ),
    ],
)
def test_a_broken_rule_names_the_keys_and_what_to_do(argv: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(argv)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "loss",
    [
        "trainer.algorithm.policy_loss_type=rollout_is",
        "trainer.algorithm.policy_loss_type=dppo",
        "trainer.algorithm.policy_loss_type=cispo trainer.algorithm.cispo.cispo_anchor=rollout",
        "trainer.algorithm.old_logprobs=rollout",
        "trainer.algorithm.policy_loss_type=of_my_own",
    ],
)
def test_losses_that_correct_for_staleness_are_taken(loss: str) -> None:
    register_policy_loss("of_my_own", POLICY_LOSSES["regular"])
    assert check(f"{ASYNC} {loss}").trainer.mode == "fully_async"


def test_the_mode_follows_the_public_switch_and_servers_that_never_rest_share_no_device() -> None:
    assert check("trainer.seed=1").trainer.mode == "plain"
    assert check("trainer.seed=1").trainer.placement.colocate_all
    assert not check(RIGHT).trainer.placement.colocate_all
    assert check("trainer.mode=one_step_off").trainer.mode == "one_step_off"


def test_a_written_configuration_keeps_its_mode(tmp_path) -> None:
    for argv in (RIGHT, "trainer.mode=one_step_off", "trainer.mode=generate"):
        file = tmp_path / "run.yaml"
        file.write_text(check(argv).to_yaml())
        assert check(f"@{file}").trainer.mode == check(argv).trainer.mode


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (
            "trainer.fully_async.max_staleness_steps=2",
            "unused: trainer.fully_async.max_staleness_steps: rollouts are not",
        ),
        (
            f"{RIGHT} trainer.fully_async.simulate_training_step_seconds=5",
            "unused: trainer.fully_async.simulate_training_step_seconds: the training is real",
        ),
        (
            "generator.merge_stepwise_output=false",
            "unused: generator.merge_stepwise_output: a trajectory is one sample",
        ),
        (
            "trainer.mode=generate trainer.epochs=3",
            "unused: trainer.epochs: nothing is trained (trainer.mode=generate)",
        ),
    ],
)
def test_what_a_mode_leaves_out_is_listed(argv: str, told: str) -> None:
    lines: list[str] = []
    resolve([*argv.split(), "trainer.device=cpu"], announce=lines.append)
    assert any(told in line for line in lines), lines
