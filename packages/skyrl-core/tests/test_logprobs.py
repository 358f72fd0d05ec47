"""Logprobs and entropies from logits."""

from __future__ import annotations

import math

import pytest
import torch
from skyrl.train.algorithms.logprobs import token_logprobs
from torch.testing import assert_close


def test_two_equal_logits_give_log_one_half_and_entropy_log_two():
    logprobs, entropy = token_logprobs(torch.zeros(1, 2), torch.tensor([1]), temperature=1.0, with_entropy=True)
    assert_close(logprobs, torch.tensor([-math.log(2)]))
    assert_close(entropy, torch.tensor([math.log(2)]))


def test_temperature_divides_the_logits():
    logits = torch.tensor([[math.log(4.0), 0.0]])
    logprobs, none = token_logprobs(logits, torch.tensor([0]), temperature=2.0, with_entropy=False)
    assert_close(logprobs, torch.tensor([math.log(2 / 3)]))
    assert none is None


def test_blocks_change_neither_values_nor_gradients():
    logits = torch.randn(10, 7, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(10) % 7
    found = []
    for block in (3, 10, None):
        leaf = logits.clone().requires_grad_()
        logprobs, entropy = token_logprobs(leaf, labels, temperature=0.7, with_entropy=True, block=block)
        (logprobs.square().sum() + entropy.square().sum()).backward()
        found.append((logprobs.detach(), entropy.detach(), leaf.grad))
    for a, b, c in zip(*found, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_bfloat16_logits_are_widened_to_float32_and_float64_is_kept():
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        logprobs, _ = token_logprobs(
            torch.zeros(2, 3, dtype=dtype), torch.tensor([0, 1]), temperature=1.0, with_entropy=False
        )
        assert logprobs.dtype == expected


def test_greedy_sampling_has_no_logprobs_to_train_on():
    with pytest.raises(ValueError, match="temperature 0"):
        token_logprobs(torch.zeros(1, 2), torch.tensor([0]), temperature=0.0, with_entropy=False)
