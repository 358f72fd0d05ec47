"""An environment whose reward varies for any text, so that a policy gets a gradient from a server without a model."""

from __future__ import annotations

import zlib
from typing import Any

from skyrl.train.environments import register
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class VariedReward(BaseTextEnv):
    """Reward in [0, 1], a fixed function of the answer's text."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        del env_config, extras

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reward = zlib.crc32(action.encode()) % 101 / 100
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})


register("varied_reward", VariedReward)
