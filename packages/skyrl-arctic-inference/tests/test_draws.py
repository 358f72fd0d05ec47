"""Tokens are drawn with their probabilities, from each row's own generator, and never one that has none."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from skyrl_arctic_inference.engine.draws import BLOCK, drawn, looked_up

ALMOST_ONE = math.nextafter(1.0, 0.0)


def probabilities(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(rows, vocabulary, generator=generator)).softmax(-1)


def plainly(probabilities_BV: torch.Tensor, uniform_B: torch.Tensor) -> list[int]:
    """The definition, token after token."""
    found = []
    for row, uniform in zip(probabilities_BV.double().numpy(), uniform_B.numpy(), strict=True):
        ends = np.cumsum(row)
        found.append(int(np.argmax(ends > uniform * ends[-1])))
    return found


@pytest.mark.parametrize("vocabulary", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 5 * BLOCK + 3])
def test_the_token_is_that_of_the_plain_definition(vocabulary: int) -> None:
    rows = 200
    made = probabilities(rows, vocabulary, seed=vocabulary)
    uniform = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert looked_up(made, uniform).tolist() == plainly(made, uniform)


@pytest.mark.parametrize("uniform", [0.0, 1e-300, 0.5, ALMOST_ONE])
@pytest.mark.parametrize("only", [0, 5, BLOCK - 1, BLOCK, 2 * BLOCK + 2])
def test_a_token_without_probability_is_never_drawn(uniform: float, only: int) -> None:
    """As after top-k, top-p or a bias: whole blocks, and both ends of the row, are 0."""
    made = torch.zeros(2, 2 * BLOCK + 3)
    made[0, only] = 1.0
    made[1, only], made[1, BLOCK + 7] = 1e-30, 1e-30
    first, second = looked_up(made, torch.full((2,), uniform, dtype=torch.float64)).tolist()
    assert first == only
    assert second in (only, BLOCK + 7)


def test_shares_follow_the_probabilities() -> None:
    """Chi-square of 100,000 draws over 300 tokens: 299 degrees of freedom, 1 in 10^6 exceed 423."""
    row = probabilities(1, 300, seed=3)
    draws = 100_000
    generators = {0: torch.Generator().manual_seed(11)}
    uniform = torch.empty(draws, dtype=torch.float64).uniform_(generator=generators[0])
    counts = torch.bincount(looked_up(row.expand(draws, -1), uniform), minlength=300).double()
    expected = row[0].double() * draws
    assert ((counts - expected) ** 2 / expected).sum() < 423


def test_a_row_draws_from_its_own_generator_and_the_others_from_torchs() -> None:
    made = torch.full((3, 1000), 1e-3)
    many = [drawn(made, {1: torch.Generator().manual_seed(s)}).tolist() for s in (5, 5, 6, 7, 8)]
    assert many[0][1] == many[1][1]
    assert len({row[1] for row in many}) > 1
    assert len({(row[0], row[2]) for row in many}) > 1
    alone = drawn(made[1:2], {0: torch.Generator().manual_seed(5)}).tolist()
    assert alone == [many[0][1]], "it does not depend on the other rows"


def test_a_row_that_is_no_number_stays_inside_the_vocabulary() -> None:
    made = torch.full((1, BLOCK + 3), math.nan)
    assert 0 <= int(looked_up(made, torch.tensor([0.3], dtype=torch.float64))) < BLOCK + 3
