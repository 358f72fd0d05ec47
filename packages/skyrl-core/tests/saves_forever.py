"""A process that resumes, trains and saves until it is killed: what `test_saves_that_fail` starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skyrl.train.checkpoints import CheckpointStore, find_resume, read_state
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.policy.contract_suite import random_minibatch, scored, spec
from skyrl.train.policy.fsdp.plugin import PLUGIN
from skyrl.train.policy.group import PolicyGroup


def config(model: Path) -> Any:
    policy = {"model": {"path": str(model)}, "optimizer_config": {"lr": 1e-3}}
    return SkyRLTrainConfig.model_validate({"trainer": {"device": "cpu", "policy": policy}})


def digest(group: PolicyGroup) -> float:
    """A number that changes with every update."""
    return sum(float(tensor.double().abs().sum()) for tensor in group.weights().values())


def resume(store: CheckpointStore, group: PolicyGroup) -> int:
    """Loads the latest checkpoint; its step. AssertionError where the weights are not those that were saved."""
    folder = find_resume(store, mode="latest", resume_path=None)
    if folder is None:
        return 0
    group.load(folder / "policy")
    state = read_state(folder)
    assert digest(group) == state["digest"]
    return state["global_step"]


def save(store: CheckpointStore, group: PolicyGroup, step: int) -> Path:
    state = {"train_loader": {}, "rows": [], "digest": digest(group)}
    return store.save(step, write=lambda folder: group.save(folder / "policy"), state=state, config_yaml="{}")


def save_forever(folder: Path, model: Path) -> None:
    cfg = config(model)
    group = PolicyGroup.create(cfg, PLUGIN, "policy", total_steps=10)
    store = CheckpointStore(folder, keep=1)
    step, batch = resume(store, group), scored(random_minibatch(1))
    while True:
        step += 1
        group.update(batch, spec(cfg))
        save(store, group, step)
