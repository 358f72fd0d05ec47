"""The step's numbers, by hand."""

import numpy as np
import pytest
import torch
from skyrl.train.generator.trajectory import Trajectory, TrajectoryID
from skyrl.train.metrics import StepTimers, batch_metrics, mean_over_minibatches, publish_metrics, reward_metrics
from skyrl.train.policy.batch import TrajectoryBatch
from skyrl.train.trainer import due, minibatches
from skyrl_rollout.weights.publisher import PublishReport


def trajectory(uid: str, repetition: int, reward: float, response: int = 2) -> Trajectory:
    rewards = np.zeros(response, dtype=np.float32)
    rewards[-1] = reward
    return Trajectory(
        TrajectoryID(uid, repetition),
        np.arange(3, dtype=np.int32),
        np.arange(response, dtype=np.int32),
        np.ones(response, dtype=np.float32),
        rewards,
        np.zeros(response, dtype=np.float32),
        np.ones(response, dtype=np.int64),
        "stop",
    )


def test_pass_at_n_is_the_share_of_prompts_with_a_reward_above_zero() -> None:
    rows = [trajectory("a", 0, 0.0), trajectory("a", 1, 1.0), trajectory("b", 0, 0.0), trajectory("b", 1, -1.0)]
    assert reward_metrics(rows, 2) == {
        "reward/avg_pass_at_2": 0.5,
        "reward/avg_raw_reward": 0.0,
        "reward/mean_positive_reward": 0.25,
    }


def test_advantage_and_kl_metrics_count_trained_tokens_only() -> None:
    batch = TrajectoryBatch.from_trajectories([trajectory("a", 0, 1.0), trajectory("a", 1, 0.0)])
    batch = batch.with_tensors(
        loss_mask_T=torch.tensor([1.0, 1.0, 1.0, 0.0]),
        advantages_T=torch.tensor([1.0, 1.0, -2.0, 99.0]),
        old_logprobs_T=torch.tensor([-1.0, -1.0, -1.0, 5.0]),
        ref_logprobs_T=torch.tensor([-2.0, -1.0, -1.0, -9.0]),
    )
    row = batch_metrics(batch)
    assert row["loss/avg_raw_advantages"] == pytest.approx(0.0)
    assert row["loss/avg_raw_advantages_abs"] == pytest.approx(4 / 3)
    assert row["loss/avg_kl"] == pytest.approx(1 / 3)
    assert row["loss/avg_kl_max"] == pytest.approx(1.0)
    assert row["loss/avg_final_rewards"] == pytest.approx(0.5)


def test_a_publish_is_reported_phase_by_phase() -> None:
    report = PublishReport(3, 4096, {"copy": 0.5, "commit": 0.25}, {"grpc://a": "shm"}, 0.125)
    assert publish_metrics(report) == {
        "publish/nbytes": 4096.0,
        "publish/stall_s": 0.125,
        "publish/copy_s": 0.5,
        "publish/commit_s": 0.25,
    }


def test_minibatch_rows_reduce_by_the_suffix_of_their_name() -> None:
    rows = [
        {"policy/grad_norm": 1.0, "policy/x_max": 1.0, "policy/x_min": 1.0, "policy/num_skipped": 1.0},
        {"policy/grad_norm": 3.0, "policy/x_max": 5.0, "policy/x_min": -5.0, "policy/num_skipped": 1.0},
    ]
    assert mean_over_minibatches(rows) == {
        "policy/grad_norm": 2.0,
        "policy/x_max": 5.0,
        "policy/x_min": -5.0,
        "policy/num_skipped": 2.0,
    }


def test_minibatches_hold_whole_groups() -> None:
    batch = TrajectoryBatch.from_trajectories([trajectory(u, i, 0.0) for u in "abcde" for i in range(2)])
    cuts = minibatches(batch, 2)
    assert [c.group_ids_S.tolist() for c in cuts] == [[0, 0, 1, 1], [2, 2, 3, 3], [4, 4]]


def test_interval_actions_fall_on_their_steps_and_on_the_last() -> None:
    assert [due(s, 5, s == 12) for s in (4, 5, 10, 11, 12)] == [False, True, True, False, True]
    assert not due(12, -1, True) and not due(12, 0, True)


def test_a_phase_that_is_entered_twice_adds_up() -> None:
    timers = StepTimers()
    for _ in range(2):
        with timers.phase("generate"):
            pass
    assert list(timers.metrics()) == ["timing/generate"]
