"""Whole small runs that stop and go on: under either backend, with reference, data and schedule in place."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import skyrl.train.quickstart
import torch
from safetensors.torch import load_file
from skyrl.train import backends, environments
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_rollout.reference.process import ReferenceServer

pytestmark = pytest.mark.ci

QUICKSTART = Path(skyrl.train.quickstart.__file__).parent
Rows = list[dict[str, float]]


class ParityEnv(BaseTextEnv):
    """Reward 1 where the codes of the answer's characters add up to an even number."""

    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        super().__init__()

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reward = float(sum(map(ord, action)) % 2 == 0)
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})


environments.register("parity_of_runs_that_go_on", ParityEnv)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ReferenceServer("--model", str(QUICKSTART / "tiny_model")) as server:
        yield server.url


@pytest.fixture
def run(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Rows]:
    """The metrics of each step of a run with these overrides: 16 prompts, 8 in a step, one update in each."""
    monkeypatch.chdir(tmp_path)
    lines = (QUICKSTART / "arithmetic_train.jsonl").read_text().splitlines()[:16]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))

    def start(*overrides: str) -> Rows:
        cfg, plugin = backends.resolve(
            [
                f"@{QUICKSTART / 'embedded.yaml'}", f"generator.inference_engine.external_server_urls={url}",
                f"data.train_data=[{tmp_path}/train.jsonl]", "generator.n_samples_per_prompt=2", "trainer.epochs=9",
                "trainer.train_batch_size=8", "trainer.policy_mini_batch_size=8", "trainer.max_training_steps=4",
                "trainer.eval_before_train=false", "trainer.eval_interval=0", "trainer.ckpt_interval=0",
                "trainer.hf_save_interval=0", "trainer.logger=jsonl", "trainer.progress=false", "trainer.device=cpu",
                "trainer.policy.optimizer_config.lr=3e-3", "trainer.policy.optimizer_config.num_warmup_steps=6",
                "environment.env_class=parity_of_runs_that_go_on", *overrides,
            ],
            announce=lambda line: None,
        )  # fmt: skip
        BasePPOExp(cfg, plugin).run()
        log = cfg.trainer.log_folder / "metrics.jsonl"
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        log.unlink()
        return rows

    return start


FOLLOWS = ("trainer.algorithm.use_kl_loss=true", "trainer.update_ref_every_epoch=true")
LATEST = "trainer.resume_mode=latest"


def column(rows: Rows, name: str) -> list[float]:
    return [row[name] for row in rows]


@pytest.mark.parametrize("backend", ["fsdp", "arctic_rl"])
def test_the_reference_follows_the_policy_at_the_end_of_an_epoch_also_over_a_resume(
    run: Callable[..., Rows], backend: str
) -> None:
    constant = "trainer.policy.optimizer_config.num_warmup_steps=0"
    own = (*FOLLOWS, f"trainer.backend={backend}", "trainer.max_training_steps=5", constant)
    straight = run(*own, "trainer.run_name=straight")
    first, second, third, fourth, fifth = column(straight, "policy/policy_kl")
    assert first == third == fifth == 0.0 and second > 0 and fourth > 0, "an epoch has two steps"

    run(*own, "trainer.ckpt_interval=3", "trainer.max_training_steps=3")
    resumed = run(*own, LATEST)
    assert [row["trainer/global_step"] for row in resumed] == [4, 5]
    for name in ("policy/policy_kl", "policy/final_loss", "policy/grad_norm", "reward/avg_raw_reward"):
        assert column(resumed, name) == column(straight, name)[3:], name


@pytest.mark.parametrize(("there", "here"), [("fsdp", "arctic_rl"), ("arctic_rl", "fsdp")])
def test_a_run_goes_on_under_the_other_backend(run: Callable[..., Rows], tmp_path: Path, there: str, here: str) -> None:
    both = (*FOLLOWS, "trainer.arctic_rl.zero_stage=2")
    of = {"fsdp": FOLLOWS, "arctic_rl": both}
    straight = run(f"trainer.backend={there}", *of[there], "trainer.hf_save_interval=4", "trainer.run_name=straight")
    half = ("trainer.max_training_steps=3", "trainer.ckpt_interval=3")
    run(f"trainer.backend={there}", *of[there], *half)
    (resumed,) = run(f"trainer.backend={here}", *of[here], LATEST, "trainer.hf_save_interval=4")
    assert resumed["reward/avg_raw_reward"] == straight[3]["reward/avg_raw_reward"]
    assert resumed["policy/policy_lr"] == straight[3]["policy/policy_lr"] > straight[2]["policy/policy_lr"]
    for name in ("policy/policy_kl", "policy/grad_norm"):
        assert resumed[name] == pytest.approx(straight[3][name], rel=1e-4), name
    first, second = (
        load_file(tmp_path / f"runs/quickstart/{name}/exports/global_step_4/policy/model.safetensors")
        for name in ("straight", "arithmetic")
    )
    gaps = {name: float((first[name] - tensor).abs().max()) for name, tensor in second.items()}
    assert max(gaps.values()) < straight[3]["policy/policy_lr"] / 100, max(gaps, key=lambda name: gaps[name])
    assert any(bool(torch.any(first[name] != 0)) for name in first)


def test_dynamic_sampling_goes_on_where_the_data_was(run: Callable[..., Rows]) -> None:
    keys = ("trainer.algorithm.dynamic_sampling.type=filter", "generator.n_samples_per_prompt=4")
    parts = (*keys, "trainer.algorithm.dynamic_sampling.max_sample_batches=50", "trainer.epochs=99")
    straight = run(*parts, "trainer.run_name=straight")
    run(*parts, "trainer.ckpt_interval=2", "trainer.max_training_steps=2")
    resumed = run(*parts, LATEST)
    assert len(resumed) == 2
    for name in ("dynamic_sampling/num_prompts", "dynamic_sampling/num_useful_prompts", "policy/grad_norm"):
        assert column(resumed, name) == column(straight, name)[2:], name
