"""Which roles a run has, how many workers each, and whether any of them computes in the trainer's own process."""

from __future__ import annotations

import pytest
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.policy.roles import any_in_process, num_workers, roles_of, roles_that_share

KL, NO_KL = ("trainer.algorithm.use_kl_loss=true",), ("trainer.algorithm.use_kl_loss=false",)
CRITIC = (*NO_KL, "trainer.algorithm.advantage_estimator=gae", "trainer.critic.model.path=Qwen/Qwen3-0.6B")
PLACE = "trainer.placement"
TWO = f"{PLACE}.policy_num_gpus_per_node=2"
APART = (f"{PLACE}.colocate_all=false", f"{PLACE}.colocate_policy_ref=false")


def config(*overrides: str) -> SkyRLTrainConfig:
    return SkyRLTrainConfig.from_cli_overrides([f"{PLACE}.colocate_all=false", *overrides])


@pytest.mark.parametrize(
    ("overrides", "here"),
    [
        (NO_KL, True),
        ((*NO_KL, TWO), False),
        ((*CRITIC, TWO), True),  # the critic has one worker of its own
        ((*CRITIC, TWO, f"{PLACE}.critic_num_gpus_per_node=2"), False),
        ((*CRITIC, f"{PLACE}.critic_num_gpus_per_node=2"), True),
        ((*KL, TWO, *APART), True),
        ((*KL, TWO, *APART, f"{PLACE}.ref_num_nodes=2"), False),
    ],
)
def test_one_worker_of_any_role_computes_in_the_trainers_process(overrides: tuple[str, ...], here: bool) -> None:
    assert any_in_process(config(*overrides)) is here


def test_a_reference_on_the_policys_devices_has_as_many_workers() -> None:
    cfg = config(*KL, TWO)
    assert roles_of(cfg) == roles_that_share(cfg) == ("policy", "ref")
    assert num_workers(cfg, "ref") == num_workers(cfg, "policy") == 2
    assert num_workers(config(*KL, TWO, *APART), "ref") == 1
