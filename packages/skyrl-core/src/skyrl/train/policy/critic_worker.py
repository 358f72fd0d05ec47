"""What every rank of the critic does: values before an update, then a step along the critic's own loss."""

from __future__ import annotations

import torch

from skyrl.train.algorithms.critic import critic_loss
from skyrl.train.policy.batch import TrajectoryBatch
from skyrl.train.policy.contract import LossSpec, Normalisers, Role
from skyrl.train.policy.worker import PolicyWorker


class CriticWorker(PolicyWorker):
    """One rank of the critic."""

    def values(self, shard: TrajectoryBatch | None, num_micro: int) -> torch.Tensor:
        """CPU [T of the shard]: the value where each response token is about to be sampled, in the shard's order."""
        return self._per_token(shard, num_micro, lambda micro: self.backend.token_values(micro, grad=False))

    def outputs(self, micro: TrajectoryBatch, spec: LossSpec) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.backend.token_values(micro, grad=True), None

    def micro_loss(
        self,
        micro: TrajectoryBatch,
        outputs: tuple[torch.Tensor, torch.Tensor | None],
        spec: LossSpec,
        normalisers: Normalisers,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return critic_loss(micro, outputs[0], spec.algorithm, num_tokens=normalisers.num_tokens)


WORKERS: dict[Role, type[PolicyWorker]] = {"policy": PolicyWorker, "critic": CriticWorker, "ref": PolicyWorker}
"""What runs in each rank of a role."""
