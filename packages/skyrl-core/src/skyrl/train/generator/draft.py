"""A trajectory while it grows: exact tokens turn by turn, what was sampled, by which weights, and its rewards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from skyrl_rollout.tokens import Sample

from skyrl.train.failures import RunFailed
from skyrl.train.generator.trajectory import PromptTask, Trajectory, TrajectoryID

UNKNOWN_VERSION = -1


class UnknownVersion(RunFailed):
    """A sample came without the weight version of its tokens; it must not be trained on."""


def require_versions(trajectories: Iterable[Trajectory]) -> None:
    """Raises UnknownVersion for a token that would be trained on and does not say which weights sampled it, as a
    generator of one's own may leave it."""
    for t in trajectories:
        unknown = int(((t.loss_mask > 0) & (t.weight_versions <= UNKNOWN_VERSION)).sum())
        if unknown:
            raise UnknownVersion(
                f"prompt {t.id.uid}, sample {t.id.repetition}: {unknown} of {int((t.loss_mask > 0).sum())} tokens that "
                f"would be trained on are of an unknown version: the generator must set weight_versions to what the "
                f"server said of each sampled token, or loss_mask to 0"
            )


class TrajectoryDraft:
    """Grows by sampled turns and by observations; never changes a token that it holds."""

    def __init__(self, prompt_token_ids: np.ndarray) -> None:
        self.prompt_token_ids = np.asarray(prompt_token_ids, dtype=np.int32)
        self.turn_num_tokens: list[int] = []
        self.stop_reason = "stop"
        self.seconds: dict[str, float] = {"llm": 0.0, "env": 0.0}
        self._tokens: list[np.ndarray] = []
        self._mask: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []
        self._versions: list[np.ndarray] = []
        self._rewards: list[np.ndarray] = []

    @property
    def input_token_ids(self) -> np.ndarray:
        """int32: everything so far, what the next turn continues."""
        return np.concatenate([self.prompt_token_ids, *self._tokens])

    @property
    def num_input_tokens(self) -> int:
        return len(self.prompt_token_ids) + sum(map(len, self._tokens))

    @property
    def last_token(self) -> int:
        return int(self._tokens[-1][-1])

    def add_turn(self, sample: Sample, *, min_version: int, where: str) -> None:
        """Appends what the policy sampled.

        Raises UnknownVersion where a token's weights are unknown or older than `min_version`.
        """
        n = len(sample.token_ids)
        if n == 0 or len(sample.logprobs) != n or len(sample.weight_versions) != n:
            raise UnknownVersion(
                f"{where}: the server sent {n} tokens, {len(sample.logprobs)} logprobs and "
                f"{len(sample.weight_versions)} weight versions: expected one of each per token, and at least one token"
            )
        oldest = int(sample.weight_versions.min())
        if oldest < min_version:
            named = "an unknown version" if oldest <= UNKNOWN_VERSION else f"weight version {oldest}"
            raise UnknownVersion(
                f"{where}: tokens of {named}, but version {min_version} is published: not used for training"
            )
        self.turn_num_tokens.append(n)
        self._append(sample.token_ids, mask=1.0, logprobs=sample.logprobs, versions=sample.weight_versions)

    def add_reward(self, reward: float) -> None:
        """Puts a turn's reward on its last sampled token."""
        self._rewards[-1][-1] = reward

    def add_observation(self, token_ids: np.ndarray) -> None:
        """Appends tokens that the policy did not sample."""
        if len(token_ids):
            n = len(token_ids)
            zeros, unknown = np.zeros(n, np.float32), np.full(n, UNKNOWN_VERSION, np.int64)
            self._append(token_ids, mask=0.0, logprobs=zeros, versions=unknown)

    def drop_last_token(self) -> None:
        """Takes back the end-of-turn token where the observation continues the turn; its reward moves one token up.

        A turn of one token keeps it, so that its reward has a place.
        """
        if self.turn_num_tokens[-1] > 1:
            self._rewards[-1][-2] = self._rewards[-1][-1]
            self.turn_num_tokens[-1] -= 1
            for parts in (self._tokens, self._mask, self._logprobs, self._versions, self._rewards):
                parts[-1] = parts[-1][:-1]

    def finish(self, task: PromptTask, repetition: int, **described: Any) -> Trajectory:
        """The trajectory; `described` are its remaining fields."""
        return Trajectory(
            id=TrajectoryID(task.uid, repetition),
            prompt_token_ids=self.prompt_token_ids,
            response_token_ids=np.concatenate(self._tokens),
            loss_mask=np.concatenate(self._mask),
            rewards=np.concatenate(self._rewards),
            rollout_logprobs=np.concatenate(self._logprobs),
            weight_versions=np.concatenate(self._versions),
            stop_reason=self.stop_reason,
            num_turns=len(self.turn_num_tokens),
            env_class=task.env_class,
            env_extras=task.env_extras,
            data_source=str(task.env_extras.get("data_source") or ""),
            turn_num_tokens=tuple(self.turn_num_tokens),
            seconds=dict(self.seconds),
            **described,
        )

    def _append(self, token_ids: np.ndarray, *, mask: float, logprobs: np.ndarray, versions: np.ndarray) -> None:
        n = len(token_ids)
        self._tokens.append(np.array(token_ids, dtype=np.int32))
        self._mask.append(np.full(n, mask, np.float32))
        self._logprobs.append(np.array(logprobs, dtype=np.float32))
        self._versions.append(np.array(versions, dtype=np.int64))
        self._rewards.append(np.zeros(n, np.float32))
