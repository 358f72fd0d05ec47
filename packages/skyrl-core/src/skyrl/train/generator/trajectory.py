"""One trajectory as the generator leaves it: exact tokens, what may be trained on, and who produced each token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class TrajectoryID:
    """`uid` names the prompt (its row in the data set), `repetition` the sample of its group."""

    uid: str
    repetition: int


@dataclass(frozen=True)
class PromptTask:
    """One prompt to roll out: OpenAI-style messages, the environment that scores it and what that environment gets."""

    uid: str
    messages: list[dict[str, str]]
    env_class: str
    env_extras: dict[str, Any]


@dataclass
class Trajectory:
    """A finished rollout. All arrays over response tokens have length R and one entry per token, in order.

    prompt_token_ids int32 [P]; response_token_ids int32 [R] (assistant turns and observations as they were sent and
    received, never re-tokenised); loss_mask float32 [R], 1 on tokens that the policy sampled; rewards float32 [R], each
    turn's reward on its last sampled token; rollout_logprobs float32 [R], NaN where the server could not say, 0 where
    loss_mask is 0; weight_versions int64 [R], -1 where loss_mask is 0.
    """

    id: TrajectoryID
    prompt_token_ids: np.ndarray
    response_token_ids: np.ndarray
    loss_mask: np.ndarray
    rewards: np.ndarray
    rollout_logprobs: np.ndarray
    weight_versions: np.ndarray
    stop_reason: str  # "stop", "length", ...
    num_turns: int = 1
    env_class: str = ""
    data_source: str = ""
    env_metrics: dict[str, Any] = field(default_factory=dict)
    env_extras: dict[str, Any] = field(default_factory=dict)  # the row's other columns
    messages: list[dict[str, str]] = field(default_factory=list)  # the conversation as text, for dumps only
    turn_num_tokens: tuple[int, ...] = ()  # sampled tokens of each turn
    seconds: dict[str, float] = field(default_factory=dict)  # "completion", and of that "llm" and "env"

    @property
    def total_reward(self) -> float:
        return float(self.rewards.sum())
