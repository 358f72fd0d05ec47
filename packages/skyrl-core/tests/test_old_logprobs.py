"""Old logprobs that come from the rollout instead of a forward pass."""

from __future__ import annotations

import pytest
import torch
from skyrl.train.failures import RunFailed
from skyrl.train.policy.batch import TrajectoryBatch
from skyrl.train.trainer import require_numbers, rollout_logprobs


def batch(logprobs: list[float], mask: list[float]) -> TrajectoryBatch:
    count = len(mask)
    return TrajectoryBatch(
        token_ids_N=torch.arange(count + 1),
        seq_lens_S=torch.tensor([count + 1]),
        prompt_lens_S=torch.tensor([1]),
        group_ids_S=torch.tensor([0]),
        loss_mask_T=torch.tensor(mask),
        rewards_T=torch.zeros(count),
        rollout_logprobs_T=torch.tensor(logprobs),
        weight_versions_T=torch.zeros(count, dtype=torch.int64),
    )


def test_tokens_that_are_not_trained_on_need_no_logprob() -> None:
    assert rollout_logprobs(batch([-1.0, float("nan"), -2.0], [1.0, 0.0, 1.0])).tolist() == [-1.0, 0.0, -2.0]


def test_a_missing_logprob_of_a_trained_token_is_an_error() -> None:
    with pytest.raises(ValueError, match="no logprob for 1 of 2 sampled tokens"):
        rollout_logprobs(batch([-1.0, float("nan")], [1.0, 1.0]))


def test_a_policy_whose_weights_broke_ends_the_run() -> None:
    three = batch([-1.0, -1.0, -1.0], [1.0, 0.0, 1.0])
    whole = torch.tensor([-1.0, float("nan"), -2.0])
    assert require_numbers(whole, three) is whole
    with pytest.raises(RunFailed, match="1 of 2 sampled tokens are not numbers"):
        require_numbers(torch.tensor([-1.0, -1.0, float("nan")]), three)
    with pytest.raises(
        RunFailed, match=r"the reference's logprobs of 1 of 2 .* give another trainer\.ref\.model\.path"
    ):
        require_numbers(torch.tensor([-1.0, -1.0, float("nan")]), three, of="ref")
