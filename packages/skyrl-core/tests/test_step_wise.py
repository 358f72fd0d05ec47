"""Episodes as one sample a turn: exact tokens, advantages of whole episodes, and merging, which gives them back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from skyrl.train import backends
from skyrl.train.algorithms.advantages import estimate
from skyrl.train.algorithms.reward_shaping import mask_zero_variance
from skyrl.train.config import AlgorithmConfig
from skyrl.train.generator.step_wise import merged, steps_of
from skyrl.train.generator.trajectory import Trajectory, TrajectoryID
from skyrl.train.policy.batch import TrajectoryBatch
from skyrl.train.trainer import minibatches
from small_runs import arguments, run

A = "trainer.algorithm"


def episode(uid: str, repetition: int, rewards: tuple[float, ...], observation: int = 2) -> Trajectory:
    """Turns of 3 tokens with these rewards, and observations of `observation` tokens between them."""
    n = 3 * len(rewards) + observation * (len(rewards) - 1)
    per_turn = 3 + observation
    sampled = np.array([i % per_turn < 3 for i in range(n)])
    values = np.zeros(n, np.float32)
    for turn, reward in enumerate(rewards):
        values[turn * per_turn + 2] = reward
    return Trajectory(
        TrajectoryID(uid, repetition),
        prompt_token_ids=np.arange(4, dtype=np.int32),
        response_token_ids=np.arange(100, 100 + n, dtype=np.int32),
        loss_mask=sampled.astype(np.float32),
        rewards=values,
        rollout_logprobs=np.where(sampled, -np.arange(n, dtype=np.float32), 0).astype(np.float32),
        weight_versions=np.where(sampled, 7, -1),
        stop_reason="stop",
        num_turns=len(rewards),
        turn_num_tokens=(3,) * len(rewards),
    )


@pytest.mark.parametrize("observation", [0, 2])
def test_a_step_has_the_exact_tokens_before_it_as_its_prompt(observation: int) -> None:
    whole = episode("0", 0, (0.5, 0.0, 1.0), observation)
    tokens = np.concatenate([whole.prompt_token_ids, whole.response_token_ids])
    steps = steps_of([whole])
    assert [len(s.response_token_ids) for s in steps] == [3, 3, 3]
    for k, step in enumerate(steps):
        begin = 4 + k * (3 + observation)
        assert step.prompt_token_ids.tolist() == tokens[:begin].tolist()
        assert step.response_token_ids.tolist() == tokens[begin : begin + 3].tolist()
        assert step.rewards.tolist() == [0, 0, (0.5, 0.0, 1.0)[k]]
        assert step.loss_mask.tolist() == [1, 1, 1] and (step.weight_versions == 7).all()
        assert step.rollout_logprobs.tolist() == whole.rollout_logprobs[begin - 4 : begin - 1].tolist()


def test_an_episode_whose_tokens_a_filter_masked_is_cut_at_the_same_places() -> None:
    whole = episode("0", 0, (0.0, 1.0))
    masked = replace(whole, loss_mask=np.zeros_like(whole.loss_mask))
    found, expected = steps_of([masked]), steps_of([whole])
    assert [s.response_token_ids.tolist() for s in found] == [s.response_token_ids.tolist() for s in expected]


@pytest.mark.parametrize("observation", [0, 2])
def test_merging_gives_the_episode_back(observation: int) -> None:
    episodes = [episode(uid, r, (0.5, 0.0, 1.0), observation) for uid in ("0", "1") for r in (0, 1)]
    again = merged(steps_of(episodes))
    assert [t.id for t in again] == [t.id for t in episodes]
    for found, expected in zip(again, episodes, strict=True):
        for name in ("prompt_token_ids", "response_token_ids", "loss_mask", "rewards", "rollout_logprobs"):
            assert getattr(found, name).tolist() == getattr(expected, name).tolist()
        assert found.weight_versions.tolist() == expected.weight_versions.tolist()
        assert found.turn_num_tokens == expected.turn_num_tokens


def test_a_turn_that_does_not_continue_the_tokens_before_it_stays_a_sample() -> None:
    first, second = steps_of([episode("0", 0, (0.0, 1.0))])
    rewritten = replace(second, prompt_token_ids=second.prompt_token_ids[2:])
    assert len(merged([first, rewritten])) == 2
    assert len(merged([first, replace(second, id=TrajectoryID("0", 1))])) == 2


def test_every_step_gets_its_episodes_advantage() -> None:
    """Totals of group 0: 1.5, 0, 0.5, 2; by hand (s - 1) / (std + 1e-6), std with divisor 3."""
    totals = [(0.5, 0.0, 1.0), (0.0,), (0.5, 0.0), (0.0, 2.0)]
    group = [episode("0", r, rewards) for r, rewards in enumerate(totals)]
    batch = TrajectoryBatch.from_trajectories(steps_of(group), step_wise=True)
    found = estimate(batch, AlgorithmConfig()).require("advantages_T")
    std = np.std([1.5, 0, 0.5, 2.0], ddof=1)
    expected = [(s - 1.0) / (std + 1e-6) for s, steps in zip([1.5, 0, 0.5, 2.0], totals, strict=True) for _ in steps]
    torch.testing.assert_close(found, torch.tensor(expected).repeat_interleave(3).float())
    whole = estimate(TrajectoryBatch.from_trajectories(group), AlgorithmConfig())
    sampled_T = whole.loss_mask_T > 0
    torch.testing.assert_close(whole.require("advantages_T")[sampled_T], found)


def test_a_group_has_no_difference_where_its_episodes_have_none() -> None:
    settings: dict[str, Any] = {"tolerance": 1e-6}
    same = [episode("0", 0, (0.0, 1.0)), episode("0", 1, (1.0, 0.0, 0.0))]
    other = [episode("1", 0, (0.0, 1.0)), episode("1", 1, (1.0, 1.0))]
    alone = [episode("2", 0, (0.0, 1.0))]
    batch = TrajectoryBatch.from_trajectories(steps_of([*same, *other, *alone]), step_wise=True)
    masked, found = mask_zero_variance(batch, **settings)
    assert found["reward/num_zero_variance_filtered"] == 1
    assert masked.loss_mask_T.tolist() == [0.0] * 15 + [1.0] * 18


def test_minibatches_keep_whole_groups() -> None:
    group = [episode(str(g), r, (0.0,) * (1 + (g + r) % 3)) for g in range(4) for r in range(2)]
    batch = TrajectoryBatch.from_trajectories(steps_of(group), step_wise=True)
    cuts = minibatches(batch, 2)
    assert [sorted(set(c.group_ids_S.tolist())) for c in cuts] == [[0, 1], [2, 3]]
    assert sum(c.num_sequences for c in cuts) == batch.num_sequences
    assert torch.equal(torch.cat([c.trajectory_ids_S for c in cuts]), batch.trajectory_ids_S)


MULTI_TURN = ("generator.max_turns=3", "generator.max_input_length=60", "trainer.max_training_steps=2")


@pytest.mark.ci
@pytest.mark.parametrize("backend", backends.installed())
def test_a_run_trains_on_turns_and_merged_it_is_the_run_on_episodes_bit_for_bit(
    backend: str, reference_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = SimpleNamespace()
    for name, keys in {
        "whole": (),
        "steps": ("generator.step_wise_trajectories=true",),
        "merged": ("generator.step_wise_trajectories=true", "generator.merge_stepwise_output=true"),
    }.items():
        setattr(
            found,
            name,
            run(arguments(reference_url, *MULTI_TURN, *keys, f"trainer.run_name={name}", f"trainer.backend={backend}")),
        )
    assert "generate/num_seq_before_merge" not in found.whole.rows[0]
    for name, after in (("steps", 48), ("merged", 16)):
        rows = getattr(found, name).rows
        assert {(r["generate/num_seq_before_merge"], r["generate/num_seq_after_merge"]) for r in rows} == {(48, after)}
    tensors = found.whole.weights.items()
    assert all(torch.equal(t, found.merged.weights[name]) for name, t in tensors)
    # the same tokens with the same advantages: only how they are laid out differs
    assert found.steps.rows[0]["policy/grad_norm"] == pytest.approx(found.whole.rows[0]["policy/grad_norm"], rel=1e-4)
    assert found.steps.rows[0]["policy/policy_entropy"] == pytest.approx(found.whole.rows[0]["policy/policy_entropy"])
