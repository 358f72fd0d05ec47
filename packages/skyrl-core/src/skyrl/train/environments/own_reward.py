"""How a plain function of the user's scores a response: `environment.reward=my_rewards:score`, one turn, no class.

The function is `score(prompt, response, extras)`: the prompt's messages, the response as text without special tokens,
and the row's other columns. It returns a number, or a mapping with a number under "reward" whose other numbers are
averaged as `environment/<name>`. It is called in several threads at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from skyrl.train import plugins


class OwnRewardEnv(BaseTextEnv):
    """`path` is "module:function"; ValueError where that is no reward function."""

    def __init__(self, path: str, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.score = plugins.reward_function(path)
        self.extras = {name: value for name, value in (extras or {}).items() if name != "max_turns"}
        self.prompt: list[dict[str, str]] = []
        self.metrics: dict[str, Any] = {}

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        self.prompt = prompt
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        answer = self.score(self.prompt, action, self.extras)
        if isinstance(answer, Mapping):
            self.metrics = {name: value for name, value in answer.items() if name != "reward"}
            answer = answer.get("reward")
        if isinstance(answer, bool) or not hasattr(answer, "__float__"):
            raise TypeError(f"it returned {answer!r:.100}: expected a number, or a mapping with one under 'reward'")
        return BaseTextEnvStepOutput(observations=[], reward=float(answer), done=True, metadata={})

    def get_metrics(self) -> dict[str, Any]:
        return self.metrics
