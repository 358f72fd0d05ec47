"""PPO with a critic on both backends: what a step reports and leaves, and that a resumed run goes on bit for bit."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import varied_reward  # noqa: F401 (registers its environment)
from safetensors.torch import load_file
from skyrl.train import backends
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl_rollout.reference.process import ReferenceServer
from training_run import EMBEDDED
from vllm_server import TINY_MODEL

BACKENDS = ("fsdp", "arctic_rl")
CRITIC = ("critic_loss", "values_mean", "values_clipfrac", "critic_lr", "grad_norm", "num_skipped_updates")
PPO = (
    "trainer.algorithm.advantage_estimator=gae", f"trainer.critic.model.path={TINY_MODEL}",
    "trainer.critic.optimizer_config.lr=1e-3", "environment.env_class=varied_reward",
    "generator.n_samples_per_prompt=2", "trainer.train_batch_size=4", "trainer.policy_mini_batch_size=4",
    "trainer.critic_mini_batch_size=2", "trainer.eval_before_train=false", "trainer.eval_interval=0",
    "trainer.ckpt_interval=0", "trainer.hf_save_interval=0", "trainer.logger=jsonl", "trainer.progress=false",
)  # fmt: skip


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ReferenceServer("--model", str(TINY_MODEL), "--logits", "canary") as server:
        yield server.url


@pytest.fixture
def run(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The metrics of each step of a small run with these overrides, in a folder of this name."""

    def start(name: str, *overrides: str) -> list[dict[str, float]]:
        (tmp_path / name).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / name)
        server = f"generator.inference_engine.external_server_urls={url}"
        cfg, plugin = backends.resolve([f"@{EMBEDDED}", server, *PPO, *overrides], announce=lambda line: None)
        BasePPOExp(cfg, plugin).run()
        log = cfg.trainer.log_folder / "metrics.jsonl"
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        log.unlink()
        return rows

    return start


@pytest.mark.ci
@pytest.mark.parametrize("backend", BACKENDS)
def test_ppo_resumes_bit_for_bit(run: Any, tmp_path: Path, backend: str) -> None:
    on = f"trainer.backend={backend}"
    whole = run("whole", on, "trainer.max_training_steps=3", "trainer.hf_save_interval=3")
    for row in whole:
        assert all(math.isfinite(row[f"critic/{name}"]) for name in CRITIC)
        assert row["critic/critic_loss"] > 0 < row["critic/grad_norm"] and row["policy/grad_norm"] > 0
        assert row["critic/num_skipped_updates"] == 0 and row["critic/critic_lr"] == pytest.approx(1e-3)
    run("stopped", on, "trainer.max_training_steps=2", "trainer.ckpt_interval=2")
    last = ("trainer.max_training_steps=3", "trainer.hf_save_interval=3", "trainer.resume_mode=latest")
    (resumed,) = run("stopped", on, *last)
    for name, value in whole[2].items():
        if name.startswith(("critic/", "policy/", "reward/", "loss/")):
            assert resumed[name] == value, name
    for role in ("policy", "critic"):
        export = f"runs/quickstart/arithmetic/exports/global_step_3/{role}/model.safetensors"
        assert (tmp_path / "stopped" / export).read_bytes() == (tmp_path / "whole" / export).read_bytes()
    exported = load_file(tmp_path / "whole" / export)
    assert "value_head.weight" in exported and "lm_head.weight" not in exported


@pytest.mark.long
@pytest.mark.parametrize(("first", "then"), [BACKENDS, BACKENDS[::-1]])
def test_ppo_goes_on_under_the_other_backend(run: Any, first: str, then: str) -> None:
    whole = run("whole", f"trainer.backend={first}", "trainer.max_training_steps=3")
    run("stopped", f"trainer.backend={first}", "trainer.max_training_steps=2", "trainer.ckpt_interval=2")
    resume = ("trainer.max_training_steps=3", "trainer.resume_mode=latest")
    (resumed,) = run("stopped", f"trainer.backend={then}", *resume)
    for name in (*(f"critic/{each}" for each in CRITIC), "policy/grad_norm", "reward/avg_raw_reward"):
        assert resumed[name] == pytest.approx(whole[2][name], rel=1e-3, abs=1e-6), name


@pytest.mark.ci
def test_every_key_of_ppo_changes_the_run(run: Any) -> None:
    two = ("trainer.max_training_steps=2", "trainer.update_epochs_per_batch=2")
    base = run("base", *two)[1]
    changed = {
        "trainer.critic_mini_batch_size=4": "critic/critic_loss",
        "trainer.critic.optimizer_config.lr=1e-4": "critic/critic_loss",
        "trainer.algorithm.gamma=0.5": "critic/critic_loss",
        "trainer.algorithm.lambd=0.5": "policy/grad_norm",
        "trainer.algorithm.value_clip=0.001": "critic/values_clipfrac",
        "trainer.update_epochs_per_batch=1": "critic/critic_loss",
    }
    for override, metric in changed.items():
        assert run("changed", *two, override)[1][metric] != base[metric], override


@pytest.mark.ci
def test_a_critic_that_nothing_reads_is_listed_and_not_started(run: Any) -> None:
    (row,) = run("grpo", "trainer.max_training_steps=1", "trainer.algorithm.advantage_estimator=grpo")
    assert not [name for name in row if name.startswith("critic/")]


@pytest.fixture(scope="module")
def plain_url() -> Iterator[str]:
    """What it says does not depend on the weights: the last bit of a sum over ranks would change every later token."""
    with ReferenceServer("--model", str(TINY_MODEL)) as server:
        yield server.url


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", BACKENDS)
def test_critic_and_policy_on_two_ranks_each_take_the_steps_of_one(run: Any, plain_url: str, backend: str) -> None:
    server = f"generator.inference_engine.external_server_urls={plain_url}"
    on = (f"trainer.backend={backend}", server, "trainer.max_training_steps=2")
    alone = run("alone", *on)
    two = run("two", *on, *(f"trainer.placement.{role}_num_gpus_per_node=2" for role in ("policy", "critic")))
    for one, both in zip(alone, two, strict=True):
        for name in (*(f"critic/{each}" for each in CRITIC), "policy/grad_norm", "loss/avg_raw_advantages_abs"):
            assert both[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6), name
