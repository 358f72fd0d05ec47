"""A batch of trajectories as flat tensors: what losses, advantages and policy workers see. No padding anywhere.

Sequences lie one after another. Tensors over all tokens have length N, over response tokens length T, over sequences
length S; the suffix of a name says which.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from skyrl.train.generator.trajectory import Trajectory, TrajectoryID

RESPONSE_FIELDS = (
    "loss_mask_T", "rewards_T", "rollout_logprobs_T", "weight_versions_T", "old_logprobs_T", "ref_logprobs_T",
    "values_T", "advantages_T", "returns_T", "loss_weights_T", "kl_weights_T", "selected_T",
)  # fmt: skip

NEEDED_FOR = {
    "old_logprobs_T": "the policy scores it before an update",
    "ref_logprobs_T": "a KL term needs the reference to score it before an update",
    "values_T": "trainer.algorithm.advantage_estimator=gae needs a critic to score it",
    "returns_T": "estimate the advantages before an update",
    "advantages_T": "estimate the advantages before an update",
}


@dataclass(frozen=True)
class TrajectoryBatch:
    """token_ids_N int64; seq_lens_S and prompt_lens_S int64, sequence s has seq_len - prompt_len response tokens;
    group_ids_S int64, equal for the samples of one prompt; trajectory_ids_S int64, where each turn is a sequence of its
    own: equal for the steps of one episode, which are in order. Response tensors are float32 (weight_versions_T int64);
    loss_weights_T and kl_weights_T float64, each token's share of the whole mini-batch's mean; selected_T bool, the
    tokens that a loss treats apart."""

    token_ids_N: torch.Tensor
    seq_lens_S: torch.Tensor
    prompt_lens_S: torch.Tensor
    group_ids_S: torch.Tensor
    loss_mask_T: torch.Tensor
    rewards_T: torch.Tensor
    rollout_logprobs_T: torch.Tensor
    weight_versions_T: torch.Tensor
    old_logprobs_T: torch.Tensor | None = None
    ref_logprobs_T: torch.Tensor | None = None
    values_T: torch.Tensor | None = None
    advantages_T: torch.Tensor | None = None
    returns_T: torch.Tensor | None = None
    loss_weights_T: torch.Tensor | None = None
    kl_weights_T: torch.Tensor | None = None
    selected_T: torch.Tensor | None = None
    trajectory_ids_S: torch.Tensor | None = None

    @property
    def num_sequences(self) -> int:
        return self.seq_lens_S.numel()

    @property
    def response_lens_S(self) -> torch.Tensor:
        return self.seq_lens_S - self.prompt_lens_S

    @property
    def segment_ids_T(self) -> torch.Tensor:
        """The sequence that each response token belongs to, 0..S-1."""
        return torch.repeat_interleave(
            torch.arange(self.num_sequences, device=self.seq_lens_S.device), self.response_lens_S
        )

    @property
    def group_ids_T(self) -> torch.Tensor:
        return torch.repeat_interleave(self.group_ids_S, self.response_lens_S)

    @property
    def positions_T(self) -> torch.Tensor:
        """Index of each response token within its response, from 0."""
        starts = torch.cumsum(self.response_lens_S, 0) - self.response_lens_S
        return torch.arange(self.loss_mask_T.numel(), device=starts.device) - torch.repeat_interleave(
            starts, self.response_lens_S
        )

    def require(self, name: str) -> torch.Tensor:
        """The optional tensor of that name. ValueError when the batch does not have it yet."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"the batch has no {name}: {NEEDED_FOR.get(name, 'fill it first')}")
        return value

    def with_tensors(self, **response_tensors: torch.Tensor) -> TrajectoryBatch:
        return replace(self, **response_tensors)

    def to(self, device: torch.device | str) -> TrajectoryBatch:
        """The same batch with every tensor on `device`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: v.to(device) for name, v in values.items() if v is not None})

    def response_index(self, sequences: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Where the response tokens of these sequences lie in a [T] tensor, in this order."""
        return _ranges(self.response_lens_S, torch.as_tensor(sequences, dtype=torch.int64))

    def select(self, sequences: Sequence[int] | torch.Tensor) -> TrajectoryBatch:
        """The sub-batch of these sequences, in this order."""
        index = torch.as_tensor(sequences, dtype=torch.int64)
        tokens = _ranges(self.seq_lens_S, index)
        response = _ranges(self.response_lens_S, index)
        out: dict[str, Any] = {
            "token_ids_N": self.token_ids_N[tokens],
            "seq_lens_S": self.seq_lens_S[index],
            "prompt_lens_S": self.prompt_lens_S[index],
            "group_ids_S": self.group_ids_S[index],
            "trajectory_ids_S": None if self.trajectory_ids_S is None else self.trajectory_ids_S[index],
        }
        for name in RESPONSE_FIELDS:
            value = getattr(self, name)
            out[name] = None if value is None else value[response]
        return TrajectoryBatch(**out)

    @staticmethod
    def concat(batches: Sequence[TrajectoryBatch]) -> TrajectoryBatch:
        """One batch of all sequences, in order. A field must be set in all batches or in none."""
        out: dict[str, Any] = {}
        for f in fields(TrajectoryBatch):
            values = [getattr(b, f.name) for b in batches]
            out[f.name] = None if values[0] is None else torch.cat(values)
        return TrajectoryBatch(**out)

    @staticmethod
    def from_trajectories(trajectories: Sequence[Trajectory], *, step_wise: bool = False) -> TrajectoryBatch:
        """Group ids number the distinct uids in order of first appearance; step_wise: trajectories of one id are the
        steps of one episode."""
        groups: dict[str, int] = {}
        group_ids = [groups.setdefault(t.id.uid, len(groups)) for t in trajectories]
        episodes: dict[TrajectoryID, int] = {}
        episode_ids = [episodes.setdefault(t.id, len(episodes)) for t in trajectories]

        def cat(arrays: Iterable[Any], dtype: torch.dtype) -> torch.Tensor:
            return torch.cat([torch.as_tensor(a, dtype=dtype) for a in arrays])

        tokens = [a for t in trajectories for a in (t.prompt_token_ids, t.response_token_ids)]
        return TrajectoryBatch(
            token_ids_N=cat(tokens, torch.int64),
            seq_lens_S=torch.tensor([len(t.prompt_token_ids) + len(t.response_token_ids) for t in trajectories]),
            prompt_lens_S=torch.tensor([len(t.prompt_token_ids) for t in trajectories]),
            group_ids_S=torch.tensor(group_ids),
            loss_mask_T=cat([t.loss_mask for t in trajectories], torch.float32),
            rewards_T=cat([t.rewards for t in trajectories], torch.float32),
            rollout_logprobs_T=cat([t.rollout_logprobs for t in trajectories], torch.float32),
            weight_versions_T=cat([t.weight_versions for t in trajectories], torch.int64),
            trajectory_ids_S=torch.tensor(episode_ids) if step_wise else None,
        )


def _ranges(lens_S: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Flat positions of the given segments, in order."""
    starts = torch.cumsum(lens_S, 0) - lens_S
    lens = lens_S[index]
    offsets = torch.arange(int(lens.sum())) - torch.repeat_interleave(torch.cumsum(lens, 0) - lens, lens)
    return torch.repeat_interleave(starts[index], lens) + offsets
