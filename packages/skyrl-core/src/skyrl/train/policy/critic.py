"""The critic as the trainer sees it: a group like the policy's that says values and takes its own steps."""

from __future__ import annotations

import torch

from skyrl.train.policy.batch import TrajectoryBatch
from skyrl.train.policy.contract import LossSpec, Normalisers
from skyrl.train.policy.group import PolicyGroup
from skyrl.train.policy.minibatch import prepare_for_critic


class CriticGroup(PolicyGroup):
    """All ranks of the critic. See `PolicyGroup`: its `update` takes the critic's step, its files are the critic's."""

    def values(self, batch: TrajectoryBatch) -> torch.Tensor:
        """CPU [T]: the value where each response token is about to be sampled, under the current weights."""
        return self._per_token("values", batch)

    def _prepared(self, minibatch: TrajectoryBatch, spec: LossSpec) -> tuple[TrajectoryBatch, Normalisers]:
        return prepare_for_critic(minibatch, spec.algorithm, world_size=self.num_workers)
