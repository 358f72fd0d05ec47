"""What the scripts of some recipes register before they call this package: a loss, an estimator, environments, a key.

Public recipes start modules of their own for this. Ours here are as small as such a script can be.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from skyrl.train import environments
from skyrl.train.algorithms.advantages import register_advantage_estimator
from skyrl.train.algorithms.policy_losses import LossInputs, TokenLoss, register_policy_loss
from skyrl.train.config import TrainerConfig, key
from skyrl.train.policy.batch import TrajectoryBatch
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

TURNS = 2


class VariedReward(BaseTextEnv):
    """A reward in [0, 1] that is a fixed function of the answer's text; a second turn where there may be one."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.turns_left = min(TURNS, (extras or {}).get("max_turns", 1))

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns_left -= 1
        reward = zlib.crc32(action.encode()) % 101 / 100
        if self.turns_left <= 0:
            return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})
        more = [{"role": "user", "content": "1+1="}]
        return BaseTextEnvStepOutput(observations=more, reward=reward, done=False, metadata={})


class FullContextTrainer(TrainerConfig):
    """`trainer.*` of the full-context example."""

    num_dummy_steps: int = key(5, "Steps on batches of full length.", ge=1)


# Public module -> make_config arguments of its own configuration.
PARTS: Mapping[str, Mapping[str, type]] = {
    "examples.train_scripts.full_context.main_full_ctx": {"trainer_cls": FullContextTrainer},
}


def reinforce(inputs: LossInputs, _algorithm: Any) -> TokenLoss:
    """-A logp."""
    return TokenLoss(-inputs.advantages_T * inputs.logprobs_T, {"clip_ratio": torch.zeros_like(inputs.advantages_T)})


def no_op(batch: TrajectoryBatch, _algorithm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The reward of each token as its advantage: with `use_kl_in_reward` it is the distance to a teacher."""
    rewards_T = batch.rewards_T * batch.loss_mask_T
    return rewards_T, rewards_T


def register() -> None:
    """All names that recipes use and this package does not have. Twice is harmless."""
    for name in ("varied", "multiply", "llm_as_a_judge", "openenv", "openreward", "bird"):
        environments.register(name, VariedReward)
    register_policy_loss("reinforce", reinforce)
    register_advantage_estimator("no_op", no_op)
