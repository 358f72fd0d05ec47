"""Which groups a step trains on under dynamic sampling: the rules on their own, and whole runs that show them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import skyrl.train.quickstart
from skyrl.train import backends, environments
from skyrl.train.algorithms.dynamic_sampling import DynamicSampling, is_useful
from skyrl.train.config.algorithm import DynamicSamplingConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.failures import RunFailed
from skyrl.train.generator.trajectory import PromptTask, Trajectory, TrajectoryID
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

QUICKSTART = Path(skyrl.train.quickstart.__file__).parent


def trajectory(uid: str, repetition: int, reward: float) -> Trajectory:
    return Trajectory(
        id=TrajectoryID(uid, repetition),
        prompt_token_ids=np.zeros(1, np.int32),
        response_token_ids=np.zeros(2, np.int32),
        loss_mask=np.ones(2, np.float32),
        rewards=np.array([0.0, reward], np.float32),
        rollout_logprobs=np.zeros(2, np.float32),
        weight_versions=np.zeros(2, np.int64),
        stop_reason="stop",
    )


def sampling(kind: str, *, batch_size: int = 3, seed: int = 0, **settings: Any) -> DynamicSampling:
    return DynamicSampling(DynamicSamplingConfig(type=kind, **settings), batch_size=batch_size, seed=seed)


def give(state: DynamicSampling, **rewards: list[float]) -> None:
    """One batch of prompts (by uid) with the rewards of their samples."""
    tasks = state.ask([PromptTask(uid, [], "any", {}) for uid in rewards])
    answers = zip(tasks, rewards.values(), strict=True)
    state.take([trajectory(task.uid, i, r) for task, group in answers for i, r in enumerate(group)])


def taken(state: DynamicSampling) -> list[str] | None:
    """The uid of each group, if the step has what it needs."""
    if state.trajectories is None:
        return None
    counts = Counter(t.id.uid for t in state.trajectories)
    assert set(counts.values()) == {2}
    return list(counts)


def test_the_filter_samples_on_until_the_batch_is_full_and_drops_the_rest() -> None:
    state = sampling("filter")
    give(state, a=[0, 0], b=[0, 1], c=[1, 1])
    assert taken(state) is None
    give(state, d=[1, 0], e=[0, 2], f=[0, 1])
    assert taken(state) == ["b", "d", "e"]
    assert state.metrics == {
        "dynamic_sampling/num_batches": 2,
        "dynamic_sampling/num_prompts": 6,
        "dynamic_sampling/num_useful_prompts": 4,
        "dynamic_sampling/avg_raw_reward": pytest.approx(7 / 12),
    }


def test_a_prompt_that_is_asked_again_in_one_step_is_a_group_of_its_own() -> None:
    state = sampling("filter", batch_size=2)
    give(state, a=[0, 1], b=[0, 0])
    give(state, b=[1, 1], a=[1, 0])
    assert taken(state) == ["a", "a#2"]


def test_sampling_ends_after_the_batches_that_it_may_take() -> None:
    state = sampling("filter", max_sample_batches=2)
    give(state, a=[0, 0], b=[0, 1], c=[1, 1])
    give(state, a=[0, 0], b=[0, 1], c=[1, 1])
    with pytest.raises(RunFailed, match=r"only 2 of 6 prompts in 2 batches have samples with different rewards"):
        state.ask([])


def test_single_samples_are_never_dropped() -> None:
    assert is_useful([trajectory("a", 0, 1.0)])
    assert not is_useful([trajectory("a", i, 0.1) for i in range(3)])


def test_a_useless_prompt_is_replaced_by_a_copy_of_a_useful_one() -> None:
    state = sampling("replace")
    give(state, a=[0, 0], b=[0, 1], c=[1, 0])
    uids = taken(state)
    assert uids in (["b#2", "b", "c"], ["c#2", "b", "c"])
    assert state.trajectories is not None
    source = uids[0].partition("#")[0]
    copied, original = ([t.total_reward for t in state.trajectories if t.id.uid == u] for u in (uids[0], source))
    assert copied == original


def test_each_useful_prompt_is_copied_once_while_there_are_enough() -> None:
    for seed in range(20):
        state = sampling("replace", batch_size=4, seed=seed)
        give(state, a=[0, 0], b=[0, 1], c=[1, 0], d=[1, 1])
        assert set(taken(state) or ()) == {"b", "b#2", "c", "c#2"}
    state = sampling("replace", batch_size=4, min_replace_ratio=0.1)
    give(state, a=[0, 0], b=[0, 1], c=[1, 1], d=[1, 1])
    assert taken(state) == ["b#2", "b", "b#3", "b#4"]


def test_a_batch_of_useful_prompts_is_left_alone() -> None:
    state = sampling("replace")
    give(state, a=[0, 1], b=[0, 1], c=[1, 0])
    assert taken(state) == ["a", "b", "c"]


def test_a_batch_with_too_few_useful_prompts_is_sampled_anew() -> None:
    state = sampling("replace", min_replace_ratio=1 / 3)
    give(state, a=[0, 0], b=[0, 1], c=[1, 1])
    assert taken(state) is None
    give(state, d=[0, 0], e=[0, 1], f=[1, 0])
    assert {uid[0] for uid in taken(state) or ()} == {"e", "f"}
    state = sampling("replace", min_replace_ratio=0.3)
    give(state, a=[0, 0], b=[0, 1], c=[1, 1])
    assert taken(state) == ["b#2", "b", "b#3"]


def test_the_choice_follows_from_the_seed() -> None:
    def choice(seed: int) -> list[str] | None:
        state = sampling("replace", batch_size=6, seed=seed)
        give(state, a=[0, 0], b=[0, 0], c=[1, 0], d=[1, 0], e=[1, 0], f=[1, 0])
        return taken(state)

    assert choice(1) == choice(1)
    assert len({tuple(choice(seed) or ()) for seed in range(10)}) > 1


# Whole runs against the reference server, whose samples are random text


class EvenLengthEnv(BaseTextEnv):
    """Reward 1 where the answer's characters add up to an even number; prompts with an odd first digit get none."""

    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        super().__init__()

    def init(self, prompt: Any) -> Any:
        self.hopeless = int(prompt[-1]["content"][0]) % 2 == 1
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reward = 0.0 if self.hopeless else float(sum(map(ord, action)) % 2 == 0)
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})


environments.register("even_sum_of_a_test", EvenLengthEnv)


def run(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> list[dict[str, float]]:
    """The metrics of each step of a small run."""
    monkeypatch.chdir(folder)
    cfg, plugin = backends.resolve(
        [
            f"@{QUICKSTART / 'embedded.yaml'}", f"generator.inference_engine.external_server_urls={url}",
            "environment.env_class=even_sum_of_a_test", "generator.n_samples_per_prompt=4",
            "trainer.train_batch_size=6", "trainer.policy_mini_batch_size=6", "trainer.max_training_steps=3",
            "trainer.eval_before_train=false", "trainer.eval_interval=0", "trainer.ckpt_interval=0",
            "trainer.hf_save_interval=0", "trainer.logger=jsonl", "trainer.progress=false", *overrides,
        ],
        announce=lambda line: None,
    )  # fmt: skip
    BasePPOExp(cfg, plugin).run()
    return [json.loads(line) for line in (cfg.trainer.log_folder / "metrics.jsonl").read_text().splitlines()]


KEY = "trainer.algorithm.dynamic_sampling"


def test_a_run_with_the_filter_trains_on_full_batches_of_useful_prompts(
    reference_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run(reference_url, tmp_path, monkeypatch, "trainer.run_name=plain")
    rows = run(reference_url, tmp_path, monkeypatch, f"{KEY}.type=filter")
    assert len(plain) == len(rows) == 3
    assert not any("dynamic_sampling/num_batches" in row for row in plain)
    for row in rows:
        assert row["dynamic_sampling/num_batches"] >= 2
        assert row["dynamic_sampling/num_useful_prompts"] >= 6
        assert row["generate/batch_num_seq"] == 24
        assert row["reward/avg_pass_at_4"] == 1.0
    assert all(row["reward/avg_pass_at_4"] < 1.0 for row in plain)
    assert [row["policy/grad_norm"] for row in rows] != [row["policy/grad_norm"] for row in plain]


def test_a_run_with_replacement_samples_one_batch_a_step(
    reference_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = run(reference_url, tmp_path, monkeypatch, f"{KEY}.type=replace", f"{KEY}.min_replace_ratio=0")
    for row in rows:
        assert row["dynamic_sampling/num_useful_prompts"] < row["dynamic_sampling/num_prompts"]
        assert row["generate/batch_num_seq"] == 24
        assert row["reward/avg_pass_at_4"] == 1.0
        assert row["dynamic_sampling/avg_raw_reward"] < row["reward/avg_raw_reward"]


def test_a_run_whose_prompts_teach_nothing_ends_with_the_reason(
    reference_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = ("environment.env_class=arithmetic", f"{KEY}.type=filter", f"{KEY}.max_sample_batches=2")
    with pytest.raises(RunFailed, match=r"only 0 of 12 prompts in 2 batches"):
        run(reference_url, tmp_path, monkeypatch, *never)


def test_a_run_ends_when_dynamic_sampling_has_used_up_its_epochs(
    reference_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """18 prompts in batches of 6 are three steps of one epoch; fewer than half of the prompts are useful."""
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join((QUICKSTART / "arithmetic_train.jsonl").read_text().splitlines()[:18]))
    data = (f"data.train_data={few}", "trainer.epochs=1", "trainer.ckpt_interval=10")
    rows = run(reference_url, tmp_path, monkeypatch, *data, f"{KEY}.type=filter")
    assert [row["step"] for row in rows] == [1, 2]
    assert sum(row["dynamic_sampling/num_batches"] for row in rows) >= 3
    assert list(tmp_path.glob("runs/quickstart/arithmetic/ckpts/global_step_2"))
