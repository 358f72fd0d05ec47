"""A checkpoint moves between backends and numbers of ranks: weights, moments, steps and schedule go on."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from skyrl.train.policy import contract_suite as suite
from skyrl.train.policy.checkpoint import contents
from skyrl.train.policy.fsdp.plugin import PLUGIN as FSDP
from test_deepspeed_backend import DeepSpeedContract
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

BATCHES = [suite.scored(suite.random_minibatch(20 + i)) for i in range(3)]
RATE = 3e-4 * 2 / 6  # of the third update, in a warm-up of six
# Another number of ranks adds up a gradient in another order, so that it differs in float32's last digits. AdamW
# divides it by its own size: of the update, which is about RATE, a thousandth may differ. Found over all pairs: 1.5e-8,
# two units in the last place of a weight of 0.1.
NEXT_UPDATE = RATE / 1000

MAKERS = ("fsdp1", "fsdp2", *(f"zero{stage}x{ranks}" for ranks in (1, 2) for stage in range(4)))


class FsdpContract(suite.PolicyContract):
    plugin = FSDP


def maker(name: str) -> suite.PolicyContract:
    """`fsdp<ranks>` or `zero<stage>x<ranks>`; with an o after the stage its state is offloaded."""
    contract: suite.PolicyContract = FsdpContract()
    if not name.startswith("fsdp"):
        contract = DeepSpeedContract()
        stage, offload = int(name[len("zero")]), name[len("zero0")] == "o"
        contract.arctic = {"zero_stage": stage, "offload_optimizer": offload, "offload_param": offload and stage == 3}
    contract.num_workers = int(name[-1])
    return contract


@dataclass(frozen=True)
class Saved:
    """A checkpoint after two updates, and what became of the weights by the third."""

    maker: str
    folder: Path
    weights: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return suite.tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def saved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Saved]]:
    made: dict[str, Saved] = {}

    def save(name: str) -> Saved:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            with maker(name).group(model, micro=3, warmup=6) as (group, cfg):
                for batch in BATCHES[:2]:
                    group.update(batch, suite.spec(cfg))
                group.save(folder)
                weights = group.weights()
                group.update(BATCHES[2], suite.spec(cfg))
                made[name] = Saved(name, folder, weights, group.weights())
        return made[name]

    yield save
    ray.shutdown()


def tensors_in(folder: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint, whole, as torch's own converter reads it."""
    out = folder.with_name(f"{folder.name}.pt")
    dcp_to_torch_save(folder / "tensors", out)
    return torch.load(out, weights_only=True)


def assert_goes_on(here: str, group: Any, cfg: Any, there: Saved, again: Path) -> float:
    """Loads it into the group, saves it again and takes the third update; how far the update is from `there`'s."""
    notes = group.load(there.folder)
    suite.assert_identical(group.weights(), there.weights)
    group.save(again)
    rate = group.update(BATCHES[2], suite.spec(cfg))["policy/policy_lr"]
    after = group.weights()
    first, second = tensors_in(there.folder), tensors_in(again)
    for kind in ("weights", "exp_avg", "exp_avg_sq"):
        suite.assert_identical(second[kind], first[kind])
    assert contents.read(again).tensors == contents.read(there.folder).tensors, "shapes, dtypes and steps"
    assert float(first["exp_avg_sq"]["model.norm.weight"].abs().max()) > 0
    assert rate == pytest.approx(RATE, abs=1e-18)
    gap = max(suite.largest_gap(after[name], tensor) for name, tensor in there.after.items())
    assert gap < NEXT_UPDATE, f"{gap:.2e}"
    if here == there.maker:
        suite.assert_identical(after, there.after)
    assert bool(notes) == (there.maker[-1] != here[-1]), notes
    return gap


def assert_moves(there: str, here: str, model: Path, saved: Callable[[str], Saved], folder: Path) -> None:
    made = saved(there)  # before the other ranks take the cores
    with maker(here).group(model, micro=3, warmup=6) as (group, cfg):
        assert_goes_on(here, group, cfg, made, folder / "again")


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ("fsdp1", "zero0x1"),
        ("fsdp1", "zero3x1"),
        ("zero2x1", "fsdp1"),
        ("zero3x1", "zero1x1"),
        ("zero2ox1", "zero3ox1"),
    ],
)
def test_a_checkpoint_moves_between_backends(
    there: str, here: str, model: Path, saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    assert_moves(there, here, model, saved, tmp_path)


@pytest.mark.ci
@pytest.mark.timeout(400)  # processes that start beside others
@pytest.mark.parametrize(("there", "here"), [("fsdp2", "zero3x1"), ("fsdp1", "zero1x2")])
def test_a_checkpoint_moves_between_numbers_of_ranks(
    there: str, here: str, model: Path, saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    assert_moves(there, here, model, saved, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("here", MAKERS)
def test_a_checkpoint_of_any_moves_to_any(
    here: str, model: Path, saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    made = {there: saved(there) for there in MAKERS}
    with maker(here).group(model, micro=3, warmup=6) as (group, cfg):
        gaps = {there: assert_goes_on(here, group, cfg, made[there], tmp_path / there) for there in MAKERS}
    print(f"{here}: " + ", ".join(f"{there} {gap:.1e}" for there, gap in gaps.items()))


def test_a_damaged_checkpoint_is_told_by_deepspeed_too_and_nothing_is_changed(
    model: Path, saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    damaged = Path(shutil.copytree(saved("zero2x1").folder, tmp_path / "damaged"))
    shard = damaged / "tensors/__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-100])
    with maker("zero2x1").group(model, micro=3, warmup=6) as (group, _cfg):
        before = group.weights()
        with pytest.raises(ValueError, match=re.escape(f"{shard} is damaged (")):
            group.load(damaged)
        suite.assert_identical(group.weights(), before)


@pytest.mark.ci
@pytest.mark.parametrize("stage", [1, 3])
def test_bfloat16_weights_go_on_from_their_float32_copies(stage: int, model: Path, tmp_path: Path) -> None:
    contract = maker(f"zero{stage}x1")
    with contract.group(model, dtype="bfloat16", micro=3) as (group, cfg):
        group.update(BATCHES[0], suite.spec(cfg))
        group.save(tmp_path / "saved")
        group.update(BATCHES[1], suite.spec(cfg))
        straight = group.weights()
    with contract.group(model, dtype="bfloat16", micro=3) as (group, cfg):
        assert group.load(tmp_path / "saved") == []
        loaded = group.weights()
        group.update(BATCHES[1], suite.spec(cfg))
        suite.assert_identical(group.weights(), straight)
    stored = tensors_in(tmp_path / "saved")["weights"]
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    suite.assert_identical(loaded, {name: tensor.bfloat16() for name, tensor in stored.items()})
    assert any(not torch.equal(stored[name], tensor.float()) for name, tensor in loaded.items())
