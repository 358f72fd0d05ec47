"""A checkpoint moves between backends and numbers of ranks: weights, moments, steps and schedule go on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import torch.distributed.checkpoint as dcp
from skyrl.train.policy import contract_suite as suite
from skyrl.train.policy.fsdp.plugin import PLUGIN as FSDP
from test_deepspeed_backend import DeepSpeedContract
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

BATCHES = [suite.scored(suite.random_minibatch(20 + i)) for i in range(3)]
# A mini-batch is summed in another order over another number of ranks: one AdamW step of 3e-4 then differs by what
# float32 rounds in a gradient, relative to its root mean square.
NEXT_UPDATE = 1e-6


class FsdpContract(suite.PolicyContract):
    plugin = FSDP


def maker(name: str) -> suite.PolicyContract:
    """`fsdp1`, `fsdp2`, or `zero<stage>x<ranks>`."""
    if name.startswith("fsdp"):
        contract: suite.PolicyContract = FsdpContract()
        contract.num_workers = int(name.removeprefix("fsdp"))
        return contract
    stage, _, ranks = name.removeprefix("zero").partition("x")
    arctic = DeepSpeedContract()
    arctic.arctic, arctic.num_workers = {"zero_stage": int(stage)}, int(ranks)
    return arctic


def state_in(folder: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint, whole, as torch's own converter reads it."""
    out = folder.with_name(f"{folder.name}.pt")
    dcp_to_torch_save(folder / "tensors", out)
    return torch.load(out, weights_only=True)


def updated(group: Any, cfg: Any, *batches: Any) -> list[dict[str, float]]:
    return [group.update(batch, suite.spec(cfg)) for batch in batches]


def assert_moves(there: str, here: str, folder: Path) -> None:
    model = suite.tiny_model(folder / "model")
    with maker(there).group(model, micro=3, warmup=6) as (group, cfg):
        updated(group, cfg, *BATCHES[:2])
        group.save(folder / "saved")
        weights = group.weights()
        (straight,) = updated(group, cfg, BATCHES[2])
        expected = group.weights()
    with maker(here).group(model, micro=3, warmup=6) as (group, cfg):
        notes = group.load(folder / "saved")
        suite.assert_identical(group.weights(), weights)
        group.save(folder / "again")
        (resumed,) = updated(group, cfg, BATCHES[2])
        after = group.weights()
    first, second = state_in(folder / "saved"), state_in(folder / "again")
    for kind in ("weights", "exp_avg", "exp_avg_sq"):
        suite.assert_identical(second[kind], first[kind])
    assert float(first["exp_avg_sq"]["model.norm.weight"].abs().max()) > 0
    assert resumed["policy/policy_lr"] == straight["policy/policy_lr"] == pytest.approx(3e-4 * 2 / 6)
    gap = max(suite.largest_gap(after[name], tensor) for name, tensor in expected.items())
    assert gap < NEXT_UPDATE, f"{gap:.2e}"
    assert bool(notes) == (there[-1] != here[-1]), notes
