"""The tokens that the policy sampled as time steps of an episode, one row a sequence.

Observations between two turns take no time: they are not discounted, and no value is read at them. Public SkyRL runs
its recursions over them too, with values that its critic was never trained on.
"""

from __future__ import annotations

import torch

from skyrl.train.algorithms.segments import segment_sum
from skyrl.train.policy.batch import TrajectoryBatch

MIN_VARIANCE = 1e-8


class SampledSteps:
    """Moves tensors between response tokens [T] and steps [S, K], K the most steps of any sequence; rows start at
    step 0 and end in zeros. Everything is float64."""

    def __init__(self, batch: TrajectoryBatch) -> None:
        self.sampled_T = batch.loss_mask_T > 0
        sequences_T, size = batch.segment_ids_T, batch.num_sequences
        steps_S = segment_sum(self.sampled_T.long(), sequences_T, size)
        before_S = torch.cumsum(steps_S, 0) - steps_S
        self.shape = (size, max(int(steps_S.max()) if size else 0, 1))
        # a token that was not sampled belongs to the step before it
        step_T = (torch.cumsum(self.sampled_T.long(), 0) - 1 - before_S[sequences_T]).clamp(min=0)
        self._cell_T = sequences_T * self.shape[1] + step_T

    def total(self, values_T: torch.Tensor) -> torch.Tensor:
        """[S, K]: each step's own value and those of the observation tokens that follow it, added up."""
        flat = torch.zeros(self.shape[0] * self.shape[1], dtype=torch.float64)
        return flat.index_add(0, self._cell_T, values_T.double()).view(self.shape)

    def own(self, values_T: torch.Tensor) -> torch.Tensor:
        """[S, K]: each step's own value."""
        return self.total(torch.where(self.sampled_T, values_T, torch.zeros_like(values_T)))

    def per_token(self, values_SK: torch.Tensor) -> torch.Tensor:
        """[T]: each sampled token's value, 0 elsewhere."""
        values_T = values_SK.flatten()[self._cell_T]
        return torch.where(self.sampled_T, values_T, torch.zeros_like(values_T))

    def whiten(self, values_T: torch.Tensor) -> torch.Tensor:
        """[T]: (x - mean) / sqrt(var + 1e-8) over sampled tokens, the variance with divisor n - 1; 0 elsewhere."""
        values = values_T[self.sampled_T]
        if not values.numel():
            return torch.zeros_like(values_T)
        mean = values.mean()
        variance = (values - mean).square().sum() / max(values.numel() - 1, 1)
        whitened_T = (values_T - mean) * (variance + MIN_VARIANCE).rsqrt()
        return torch.where(self.sampled_T, whitened_T, torch.zeros_like(values_T))
