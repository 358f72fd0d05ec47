"""Each key changes what is made of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from key_effects import EFFECTS, QUICKSTART, VALUES
from skyrl.train import backends, environments
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.launch import command, table
from skyrl.train.policy.contract import Role, WorkerPlace
from skyrl.train.policy.fsdp.model import offloads
from skyrl.train.policy.fsdp.plugin import IN_HOST_MEMORY, PLUGIN
from skyrl.train.policy.group import PolicyGroup
from skyrl_gym.envs import registration
from small_runs import CodesEnv, arguments, run


@pytest.mark.parametrize("key", EFFECTS)
def test_the_key_changes_what_is_made_of_it(
    key: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.chdir(tmp_path_factory.getbasetemp())
    effect = EFFECTS[key]
    others = (*effect.others, "trainer.device=cpu")
    before, after = (
        effect.made(backends.resolve([*others, *argv], announce=lambda line: None)[0])
        for argv in ((), (f"{key}={effect.value}",))
    )
    assert before != after


@pytest.mark.ci
def test_a_step_has_the_batches_that_are_asked_for(
    reference_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """train_batch_size, n_samples_per_prompt, policy_mini_batch_size and update_epochs_per_batch: each update raises
    the rate of a warm-up by one part."""
    monkeypatch.chdir(tmp_path)
    warm_up = ("trainer.policy.optimizer_config.num_warmup_steps=100", "trainer.policy.optimizer_config.lr=1e-3")
    sizes = ("trainer.train_batch_size=6", "generator.n_samples_per_prompt=3", "trainer.max_training_steps=1")
    plain = run(arguments(reference_url, *warm_up, *sizes, "trainer.policy_mini_batch_size=6"))
    assert [len(batch) for batch in plain.batches] == [18]
    assert plain.rows[0]["policy/policy_lr"] == 0.0
    cut = ("trainer.policy_mini_batch_size=2", "trainer.update_epochs_per_batch=2", "trainer.run_name=cut")
    (row,) = run(arguments(reference_url, *warm_up, *sizes, *cut)).rows
    assert row["policy/policy_lr"] == pytest.approx(1e-3 * (0 + 1 + 2 + 3 + 4 + 5) / 6 / 100)


def test_both_sides_hold_the_same_part_of_a_model() -> None:
    key = "language_model_only=true"
    cfg, _ = backends.resolve(
        [f"trainer.policy.{key}", f"generator.inference_engine.{key}"], announce=lambda line: None
    )
    engine = cfg.generator.inference_engine
    assert "language_model_only=true" in command.build(table.find(engine), engine, VALUES, device="cpu", binaries=None)


def test_an_environment_of_ones_own_gets_the_section_of_its_name(
    reference_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registration, "registry", dict(registration.registry))
    given: list[str] = []

    def judge(env_config: Any = None, extras: Any = None) -> CodesEnv:
        given.append(env_config.model)
        return CodesEnv(env_config, extras)

    registration.registry.pop("llm_as_a_judge", None)
    environments.register("llm_as_a_judge", judge)
    named = ("environment.env_class=llm_as_a_judge", "environment.skyrl_gym.llm_as_a_judge.model=another")
    run(arguments(reference_url, *named, "trainer.max_training_steps=1"))
    assert set(given) == {"another"}


@contextmanager
def sharded_by_itself(role: Role, **fsdp: Any) -> Iterator[list[Any]]:
    """The modules of a model, but the whole one, that FSDP shards each by itself."""
    fsdp = {"mixed_precision": {}} | fsdp  # which takes FSDP on one rank too
    part = {"model": {"path": str(QUICKSTART / "tiny_model")}, "fsdp_config": fsdp}
    cfg = SkyRLTrainConfig.model_validate({"trainer": {"device": "cpu", role: part}})
    group = PolicyGroup.create(cfg, PLUGIN, role, total_steps=1)
    try:
        model = group._workers._worker.backend.model  # of this process's own worker
        yield [m for m in model.modules() if type(m).__name__.startswith("FSDP") and m is not model]
    finally:
        group.close()


@pytest.mark.parametrize("kept", [True, False])
def test_gathered_weights_are_freed_after_the_forward_pass_or_kept(kept: bool) -> None:
    with sharded_by_itself("policy", reshard_after_forward=not kept) as modules:
        assert (modules[0]._get_fsdp_state()._fsdp_param_group.post_forward_mesh_info is None) is kept


@pytest.mark.parametrize("role", ["policy", "ref"])
def test_the_layers_of_the_named_class_are_sharded_one_by_one(role: Role) -> None:
    with sharded_by_itself(role) as modules:
        assert {type(module).__name__ for module in modules} == {"FSDPQwen3DecoderLayer"}
    with sharded_by_itself(role, wrap_policy={"transformer_layer_cls_to_wrap": ["Qwen3MLP"]}) as modules:
        assert {type(module).__name__ for module in modules} == {"FSDPQwen3MLP"}


@pytest.mark.parametrize("role", ["policy", "critic", "ref"])
def test_host_memory_is_asked_for_beside_a_gpu_and_listed_as_unused_without_one(role: Role) -> None:
    key = f"trainer.{role}.fsdp_config.cpu_offload"
    lines: list[str] = []
    argv = [f"{key}=true", "trainer.device=cpu", "trainer.critic.model.path=a/b"]
    cfg, _ = backends.resolve([*argv, "trainer.algorithm.advantage_estimator=gae"], announce=lines.append)
    assert f"  unused: {key}: {IN_HOST_MEMORY}" in lines
    part = getattr(cfg.trainer, role)
    places = [WorkerPlace(0, 1, torch.device(device)) for device in ("cuda", "cpu")]
    assert [offloads(part, place) for place in places] == [True, False]
    assert not offloads(getattr(SkyRLTrainConfig().trainer, role), places[0])


@pytest.mark.ci
def test_what_a_run_leaves_follows_its_intervals(
    reference_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ckpt_interval, max_ckpts_to_keep, hf_save_interval, eval_interval, eval_before_train, dump_eval_results,
    dump_data_batch and eval_n_samples_per_prompt, each by its files or metrics."""
    monkeypatch.chdir(tmp_path)
    places = (f"trainer.ckpt_path={tmp_path}/ckpts", f"trainer.export_path={tmp_path}/exports")
    run(arguments(reference_url, *places))
    assert not list(tmp_path.glob("ckpts/*")) and not list(tmp_path.glob("exports/*"))
    ran = run(
        arguments(
            reference_url, *places, "trainer.max_training_steps=4", "trainer.ckpt_interval=1",
            "trainer.max_ckpts_to_keep=2", "trainer.hf_save_interval=3", "trainer.eval_interval=2",
            "trainer.eval_before_train=true", "trainer.dump_data_batch=true", "generator.eval_n_samples_per_prompt=2",
        )
    )  # fmt: skip
    names = {path.name for path in (tmp_path / "ckpts").iterdir() if path.is_dir()}
    assert {name for name in names if name.startswith("global_step_")} == {"global_step_3", "global_step_4"}
    exports = {path.name for path in (tmp_path / "exports").iterdir()}
    assert {"global_step_3", "global_step_4"} <= exports and "global_step_1" not in exports
    assert len(list(tmp_path.glob("exports/**/*.npz"))) == 4
    evaluated = [row["step"] for row in ran.rows if "eval/all/avg_score" in row]
    assert evaluated == [0, 2, 4]
    assert "eval/all/pass_at_2" in ran.rows[0]
    assert len(list(tmp_path.glob("exports/dumped_evals/*"))) == 3
