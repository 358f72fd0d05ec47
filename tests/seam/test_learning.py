"""Reward climbs on real parts: vLLM serves, the trainer learns, weights go back over gRPC."""

from pathlib import Path
from typing import Any

import pytest
from training_run import ROOT, TrainingRun, mean

CONVERGENCE = (
    "trainer.train_batch_size=4",
    "trainer.policy_mini_batch_size=4",
    "generator.n_samples_per_prompt=4",
    "trainer.max_training_steps=9",
)
WRONG_SIGN = [str(ROOT / "tests/seam/wrong_sign.py")]


def default_run(folder: Path, backend: str, seed: int) -> TrainingRun:
    return TrainingRun(folder, f"trainer.backend={backend}", f"trainer.seed={seed}").run()


def assert_it_learned(run: TrainingRun) -> None:
    rewards = run.rewards()
    assert len(rewards) == 100
    first, last = mean(rewards[:10]), mean(rewards[-10:])
    assert last >= 0.90 and last >= first + 0.35, f"first ten {first:.3f}, last ten {last:.3f}"


@pytest.mark.ci
@pytest.mark.timeout(700)
@pytest.mark.parametrize("backend", ["arctic_rl", "fsdp"])
def test_the_default_run_learns(tmp_path: Path, backend: str) -> None:
    run = default_run(tmp_path, backend, 1)
    assert_it_learned(run)
    gaps = [row["policy/rollout_train_logprobs_abs_diff_mean"] for row in run.steps().values()]
    assert max(gaps) <= 1e-6, f"largest mean |trainer - rollout| logprob of a step: {max(gaps):.2e}"


@pytest.mark.long
@pytest.mark.timeout(700)
@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("backend", ["arctic_rl", "fsdp"])
def test_the_default_run_learns_on_every_seed(tmp_path: Path, backend: str, seed: int) -> None:
    assert_it_learned(default_run(tmp_path, backend, seed))


def nine_steps(folder: Path, seed: int, **kwargs: Any) -> list[float]:
    """The mean reward of each of nine steps of 4 prompts x 4 samples."""
    run = TrainingRun(folder, *CONVERGENCE, "trainer.backend=arctic_rl", f"trainer.seed={seed}", **kwargs).run()
    for word in ("Step", "avg_pass@4", "avg_raw_reward", "sec/it", "trainer/global_step: 9"):
        assert word in run.output
    rewards = run.rewards()
    assert len(rewards) == 9
    return rewards


def gain(rewards: list[float]) -> float:
    """Mean reward of steps 5-9 minus that of steps 1-4."""
    return mean(rewards[4:]) - mean(rewards[:4])


@pytest.mark.ci
@pytest.mark.timeout(400)
def test_nine_small_steps_go_where_the_sign_of_the_advantage_says(tmp_path: Path) -> None:
    """Both runs see the same prompts, so that what remains is what they learned; a gain over other prompts of one run
    of 16 samples a step is mostly luck."""
    right = nine_steps(tmp_path / "right", seed=1)
    wrong = nine_steps(tmp_path / "wrong", seed=1, entrypoint=WRONG_SIGN)
    assert mean(right[4:]) > mean(wrong[4:]) + 0.1, (right, wrong)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_nine_small_steps_lift_the_reward_over_five_seeds(tmp_path: Path) -> None:
    gains = [gain(nine_steps(tmp_path / str(seed), seed=seed)) for seed in range(1, 6)]
    assert mean(gains) > 0, gains


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_with_the_wrong_sign_they_do_not(tmp_path: Path) -> None:
    gains = [gain(nine_steps(tmp_path / str(seed), seed=seed, entrypoint=WRONG_SIGN)) for seed in range(1, 6)]
    assert mean(gains) < 0, gains
