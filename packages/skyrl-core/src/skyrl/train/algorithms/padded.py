"""A user's estimator or loss of the public form, which sees padded rectangles, as one that takes flat tokens.

A rectangle is [B, A]: a row per sequence, its response tokens at the right end, zeros before them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from skyrl.train.algorithms.losses.inputs import LossInputs, TokenLoss
from skyrl.train.policy.batch import TrajectoryBatch


@dataclass(frozen=True)
class PaddedEstimator:
    """f(token_level_rewards=, response_mask=, index=, values=, grpo_norm_by_std=, gamma=, lambd=, config=) ->
    (advantages, returns), all [B, A] but `index`, an array of the B sequences' groups as texts."""

    function: Callable[..., Any]

    def __call__(self, batch: TrajectoryBatch, algorithm: Any) -> tuple[torch.Tensor, torch.Tensor]:
        pad = Rectangle.of(batch.segment_ids_T)
        values_BA = None if batch.values_T is None else pad.rows(batch.values_T)
        advantages_BA, returns_BA = self.function(
            token_level_rewards=pad.rows(batch.rewards_T),
            response_mask=pad.rows(torch.ones_like(batch.loss_mask_T)),
            index=np.array([str(group) for group in batch.group_ids_S.tolist()]),
            values=values_BA,
            grpo_norm_by_std=algorithm.grpo_norm_by_std,
            gamma=algorithm.gamma,
            lambd=algorithm.lambd,
            config=algorithm,
        )
        return pad.flat(advantages_BA).float(), pad.flat(returns_BA).float()


@dataclass(frozen=True)
class PaddedLoss:
    """f(log_probs, old_log_probs, advantages, config=, loss_mask=, rollout_logprobs=) -> (loss, metrics), where the
    advantages carry the loss reduction already, so that the loss is a plain sum over tokens. Metrics are numbers by
    name; a single number is `clip_ratio`. Where the sum is a mean instead, the gradient depends on micro-batches."""

    function: Callable[..., Any]

    def __call__(self, inputs: LossInputs, algorithm: Any) -> TokenLoss:
        assert inputs.loss_weights_T is not None, "the objective fills in the weights"
        pad = Rectangle.of(inputs.segment_ids_T)
        trained_T = inputs.loss_mask_T > 0
        known = {
            "loss_mask": pad.rows(inputs.loss_mask_T),
            "rollout_logprobs": pad.rows(_known(inputs.rollout_logprobs_T)),
        }
        accepted = _accepted(self.function, {"config": algorithm, **known})
        loss, metrics = self.function(
            pad.rows(inputs.logprobs_T),
            pad.rows(torch.where(trained_T, inputs.old_logprobs_T, inputs.logprobs_T.detach())),
            pad.rows(inputs.advantages_T * inputs.loss_weights_T.to(inputs.advantages_T.dtype)),
            **accepted,
        )
        named = metrics if isinstance(metrics, dict) else {"clip_ratio": metrics}
        found_T = {name: torch.full_like(inputs.logprobs_T.detach(), float(value)) for name, value in named.items()}
        return TokenLoss(loss.reshape(1), found_T, weighed=True)


@dataclass(frozen=True)
class Rectangle:
    """Moves tensors between response tokens [T] and rows [B, A]."""

    shape: tuple[int, int]
    cell_T: torch.Tensor

    @staticmethod
    def of(segment_ids_T: torch.Tensor) -> Rectangle:
        lens_B = torch.bincount(segment_ids_T)
        width = int(lens_B.max()) if lens_B.numel() else 0
        ends_B = torch.cumsum(lens_B, 0)
        tokens_T = torch.arange(segment_ids_T.numel(), device=segment_ids_T.device)
        before_end_T = ends_B[segment_ids_T] - tokens_T
        return Rectangle((lens_B.numel(), width), segment_ids_T * width + width - before_end_T)

    def rows(self, values_T: torch.Tensor) -> torch.Tensor:
        """[B, A] with zeros before each row's tokens; gradients pass."""
        flat = torch.zeros(self.shape[0] * self.shape[1], dtype=values_T.dtype, device=values_T.device)
        return flat.index_copy(0, self.cell_T, values_T).view(self.shape)

    def flat(self, values_BA: torch.Tensor) -> torch.Tensor:
        """[T] of what `rows` laid out."""
        return values_BA.reshape(-1)[self.cell_T]


def as_estimator(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, or a `PaddedEstimator` where its parameters are the public ones."""
    names = inspect.signature(function).parameters
    only_named = all(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in names.values())
    return PaddedEstimator(function) if "token_level_rewards" in names or only_named else function


def as_policy_loss(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, or a `PaddedLoss` where its parameters are the public ones."""
    return PaddedLoss(function) if "log_probs" in inspect.signature(function).parameters else function


def _accepted(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of the arguments that the function has a place for: older forms have no rollout logprobs."""
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in arguments.items() if takes_any or name in parameters}


def _known(logprobs_T: torch.Tensor) -> torch.Tensor:
    """0 where a server said none."""
    return torch.where(logprobs_T.isnan(), torch.zeros_like(logprobs_T), logprobs_T)
