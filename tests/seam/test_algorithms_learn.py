"""Every algorithm lifts the reward, and none does with the wrong sign; the figures are in docs/learning.md."""

from pathlib import Path

import pytest
from algorithms_that_learn import RUNS, STEPS, measure

pytestmark = [pytest.mark.long, pytest.mark.timeout(700)]

LIFT = 0.2


@pytest.mark.parametrize("name", list(RUNS))
def test_it_lifts_the_reward_over_the_evaluation_before_the_first_step(tmp_path: Path, name: str) -> None:
    found = measure(tmp_path, name)
    assert found.steps == STEPS
    assert found.lift >= LIFT, found


@pytest.mark.parametrize("name", list(RUNS))
def test_with_the_wrong_sign_it_does_not(tmp_path: Path, name: str) -> None:
    found = measure(tmp_path, name, wrong_sign=True)
    assert found.steps == STEPS
    assert found.lift < 0, found
