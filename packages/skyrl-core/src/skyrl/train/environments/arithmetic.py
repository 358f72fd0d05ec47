"""Whether a model wrote the sum it was asked for: reward 1 for exactly the answer, else 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from skyrl.train.data.arithmetic import is_correct


class ArithmeticEnv(BaseTextEnv):
    """One turn. `extras["reward_spec"]["ground_truth"]` is the answer's text; ValueError where it is missing."""

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        answer = ((extras or {}).get("reward_spec") or {}).get("ground_truth")
        if not (isinstance(answer, str) and answer):
            raise ValueError(f"arithmetic needs reward_spec.ground_truth as text, such as '055', got {answer!r}")
        self.answer = answer

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reward = 1.0 if is_correct(self.answer, action) else 0.0
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})
