"""Whether scores, rollout metrics and the logprob gap are what their names say."""

import math

import numpy as np
import pytest
import torch
from skyrl.train.generator.evaluation import evaluation_metrics
from skyrl.train.generator.metrics import generation_metrics
from skyrl.train.generator.trajectory import Trajectory, TrajectoryID
from skyrl.train.policy.batch import TrajectoryBatch
from skyrl.train.rollouts.logprob_gap import logprob_gap_metrics


def trajectory(uid, rewards, *, repetition=0, source="sums", mask=None, logprobs=None, **more) -> Trajectory:
    n = len(rewards)
    mask = np.ones(n, np.float32) if mask is None else np.asarray(mask, np.float32)
    return Trajectory(
        TrajectoryID(uid, repetition),
        prompt_token_ids=np.array([1, 2], np.int32),
        response_token_ids=np.arange(n, dtype=np.int32),
        loss_mask=mask,
        rewards=np.asarray(rewards, np.float32),
        rollout_logprobs=np.asarray(logprobs if logprobs is not None else [-1.0] * n, np.float32),
        weight_versions=np.where(mask > 0, 4, -1),
        stop_reason=more.pop("stop_reason", "stop"),
        data_source=source,
        turn_num_tokens=more.pop("turn_num_tokens", (n,)),
        **more,
    )


def test_scores_are_per_data_source_and_over_all():
    m = evaluation_metrics(
        [
            trajectory("0", [0, 1.0], source="a/b"),
            trajectory("0", [0, -1.0], source="a/b", repetition=1),
            trajectory("1", [0, 0.0], source=""),
            trajectory("1", [0, 0.0], source="", repetition=1),
        ],
        2,
    )
    assert m == {
        "eval/a_b/avg_score": 0.0,
        "eval/a_b/pass_at_2": 1.0,
        "eval/a_b/mean_positive_reward": 0.5,
        "eval/unknown/avg_score": 0.0,
        "eval/unknown/pass_at_2": 0.0,
        "eval/unknown/mean_positive_reward": 0.0,
        "eval/all/avg_score": 0.0,
        "eval/all/pass_at_2": 0.5,
        "eval/all/mean_positive_reward": 0.25,
    }


def test_a_multi_turn_episode_passes_by_how_it_ended():
    m = evaluation_metrics([trajectory("0", [0.04, 0, 0.0])], 1)
    assert m["eval/sums/pass_at_1"] == 0.0
    assert m["eval/sums/avg_score"] == pytest.approx(0.04)


def test_rollout_metrics_count_tokens_turns_versions_and_times():
    times = {"completion": 3.0, "llm": 1.0, "env": 1.5}
    m = generation_metrics(
        [
            trajectory("0", [0, 0, 0, 1.0], mask=[1, 0, 0, 1], turn_num_tokens=(1, 1), seconds=times),
            trajectory("1", [0, 0], stop_reason="length", logprobs=[math.nan, -1], seconds=times),
        ]
    )
    assert (m["generate/min_num_tokens"], m["generate/max_num_tokens"], m["generate/avg_num_tokens"]) == (2, 4, 3)
    assert m["generate/avg_assistant_tokens"] == 2
    assert (m["generate/avg_tokens_non_zero_rewards"], m["generate/avg_tokens_zero_rewards"]) == (4, 2)
    assert m["generate/tokens_per_turn_max"] == 2
    assert m["generate/stop_ratio"] == 0.5
    assert m["generate/invalid_logprobs"] == 1
    assert m["generate/weight_version_min"] == m["generate/weight_version_max"] == 4
    assert m["generate/trajectory_time_other_mean"] == 0.5


def test_what_environments_report_is_averaged():
    m = generation_metrics(
        [trajectory(str(i), [1.0], env_class="gsm8k_multi_turn", env_metrics={"steps": i}) for i in (1, 2)]
    )
    assert m["environment/avg_steps"] == 1.5


def test_the_logprob_gap_is_over_sampled_tokens_and_counts_what_is_unknown():
    batch = TrajectoryBatch.from_trajectories(
        [trajectory("0", [0, 0, 0, 0], mask=[1, 0, 1, 1], logprobs=[-1.0, 0.0, math.nan, -2.0])]
    ).with_tensors(old_logprobs_T=torch.tensor([-1.5, -9.0, -1.0, -2.0]))
    m = logprob_gap_metrics(batch)
    assert m["policy/rollout_train_logprobs_num_invalid"] == 1
    assert m["policy/rollout_train_logprobs_abs_diff_mean"] == pytest.approx(0.25)
    assert m["policy/rollout_train_logprobs_abs_diff_max"] == pytest.approx(0.5)
    assert m["policy/rollout_train_logprobs_abs_diff_min"] == 0.0
    assert m["policy/rollout_train_logprobs_abs_diff_std"] == pytest.approx(0.25)


def test_without_old_logprobs_there_is_no_gap_to_report():
    assert logprob_gap_metrics(TrajectoryBatch.from_trajectories([trajectory("0", [1.0])])) == {}
