"""KL estimates against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from skyrl.train.algorithms.kl import token_kl
from torch.testing import assert_close

LOGPROBS, REFERENCE = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -2.0, -2.0])
ONES = torch.ones(3)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("k1", [0.5, 0.0, -1.0]),
        ("abs", [0.5, 0.0, 1.0]),
        ("k2", [0.125, 0.0, 0.5]),
        ("k3", [math.exp(-0.5) - 1 + 0.5, 0.0, math.exp(1) - 1 - 1]),
    ],
)
def test_each_estimator_computes_its_formula(name, expected):
    assert_close(token_kl(LOGPROBS, REFERENCE, ONES, estimator=name), torch.tensor(expected))


def test_k3_is_clamped_to_10_however_far_apart_the_two_are():
    far = token_kl(torch.tensor([-100.0, -1.0]), torch.tensor([-1.0, -100.0]), torch.ones(2), estimator="k3")
    # the second difference, 99, is first cut to 20: exp(-20) - 1 + 20, then to 10
    assert_close(far, torch.tensor([10.0, 10.0]))


def test_tokens_that_are_not_trained_on_count_0_and_get_no_gradient_even_if_nan():
    logprobs = LOGPROBS.clone().requires_grad_()
    reference = torch.tensor([-1.5, math.nan, -2.0])
    kl = token_kl(logprobs, reference, torch.tensor([1.0, 0.0, 1.0]), estimator="k3")
    kl.sum().backward()
    assert kl[1] == 0 and logprobs.grad[1] == 0 and torch.isfinite(logprobs.grad).all()


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="kl_estimator_type=k4: known: abs, k1, k2, k3"):
        token_kl(LOGPROBS, REFERENCE, ONES, estimator="k4")
