"""What a checkpoint of training state holds, and which file is named where it cannot be read."""

from __future__ import annotations

import math
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.policy.checkpoint import contents, shards
from skyrl.train.policy.checkpoint.random_state import draw_random_state
from skyrl.train.policy.checkpoint.stretch import Stretch, boxes
from skyrl.train.policy.checkpoint.training_state import require_shared
from skyrl.train.policy.contract import WorkerPlace
from skyrl.train.policy.contract_suite import assert_identical, random_minibatch, scored, spec, tiny_model
from skyrl.train.policy.fsdp.plugin import PLUGIN
from skyrl.train.policy.group import PolicyGroup
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (2, 3, 5), (2, 1, 3, 2)])
def test_boxes_are_exactly_the_elements_of_the_stretch_in_its_order(shape: tuple[int, ...]) -> None:
    whole = np.arange(math.prod(shape)).reshape(shape)
    for start in range(whole.size):
        for length in range(whole.size - start + 1):
            found = [
                whole[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))].ravel()
                for box in boxes(shape, start, length)
            ]
            assert [int(i) for piece in found for i in piece] == list(range(start, start + length))


def test_a_stretch_gives_live_pieces_in_the_shape_of_their_box() -> None:
    stretch = Stretch((3, 4), 2, values := torch.arange(2.0, 11.0))
    stretch.piece((1, 0)).fill_(-1)
    assert values.tolist() == [2, 3, -1, -1, -1, -1, 8, 9, 10]
    assert stretch.piece((2, 0)).tolist() == [[8, 9, 10]]
    with pytest.raises(KeyError, match=r"\(0, 0\)"):
        stretch.piece((0, 0))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def config(model: Path, **policy: Any) -> Any:
    tree = {"model": {"path": str(model)}, "optimizer_config": {"lr": 1e-3}} | policy
    return SkyRLTrainConfig.model_validate({"trainer": {"device": "cpu", "policy": tree}})


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[[Any], PolicyGroup]]:
    started: list[PolicyGroup] = []

    def start(cfg: Any) -> PolicyGroup:
        started.append(PolicyGroup.create(cfg, PLUGIN, "policy", total_steps=10))
        return started[-1]

    yield start
    for group in started:
        group.close()


@pytest.fixture(scope="module")
def trained(start: Any, model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[PolicyGroup, Path]:
    """A group after one update, and its checkpoint."""
    cfg, folder = config(model), tmp_path_factory.mktemp("saved")
    group = start(cfg)
    group.update(scored(random_minibatch(9)), spec(cfg))
    group.save(folder)
    return group, folder


@pytest.fixture
def saved(trained: tuple[PolicyGroup, Path], tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(trained[1], tmp_path / "copy"))


def test_torchs_own_converter_reads_it_under_the_models_names(trained: Any, tmp_path: Path) -> None:
    group, folder = trained
    dcp_to_torch_save(folder / "tensors", tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert_identical(found["weights"], group.weights())
    assert set(found["exp_avg"]) == set(found["exp_avg_sq"]) == set(group.weights())
    entries = contents.read(folder).tensors
    assert {name: entry.shape for name, entry in entries.items()} == {n: t.shape for n, t in group.weights().items()}
    assert {entry.steps for entry in entries.values()} == {1}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {"cut": (cut, "is damaged"), "changed": (flip, "is damaged"), "gone": (Path.unlink, "is missing")}
FILES = ("tensors/__0_0.distcp", "tensors/.metadata", "random_0.pt")


@pytest.mark.parametrize(
    ("file", "damage"),
    [*((file, damage) for file in FILES for damage in DAMAGES), ("contents.json", "cut"), ("contents.json", "gone")],
)
def test_a_damaged_file_is_named_and_nothing_is_changed(trained: Any, saved: Path, file: str, damage: str) -> None:
    group, before = trained[0], trained[0].weights()
    change, told = DAMAGES[damage]
    change(saved / file)
    with pytest.raises(ValueError, match=f"{re.escape(str(saved / file))} {told}.*resume from another global_step_N"):
        group.load(saved)
    assert_identical(group.weights(), before)


def test_a_checkpoint_of_another_model_lists_names_and_shapes(start: Any, trained: Any, tmp_path: Path) -> None:
    other = start(config(tiny_model(tmp_path / "untied", tied=False)))
    with pytest.raises(ValueError, match=r"lm_head\.weight \[40, 64\] is missing: the checkpoint is of another model"):
        other.load(trained[1])
    other.save(tmp_path / "other")
    with pytest.raises(ValueError, match=r"lm_head\.weight \[40, 64\] is not in the model"):
        trained[0].load(tmp_path / "other")


def test_the_layout_of_an_earlier_version_is_told_apart(trained: Any, tmp_path: Path) -> None:
    (tmp_path / "model_world_size_1_rank_0.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"contents\.json is missing .*layout of another version.*export"):
        trained[0].load(tmp_path)


def test_an_index_that_would_run_something_is_refused(trained: Any, saved: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(saved / "exploded"),)

    (saved / "tensors/.metadata").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match=r"mkdir has no place in an index"):
        shards.read(saved / "tensors", {"weights": {"x": torch.zeros(1)}})
    assert not (saved / "exploded").exists()


def test_settings_of_the_optimizer_may_change_between_save_and_load(start: Any, model: Path, trained: Any) -> None:
    slow = config(model, optimizer_config={"lr": 1e-5})
    group = start(slow)
    assert group.load(trained[1]) == []
    assert group.update(scored(random_minibatch(9)), spec(slow))["policy/policy_lr"] == 1e-5


def test_a_model_of_another_precision_goes_on_and_says_so(start: Any, model: Path, trained: Any) -> None:
    group = start(config(model, model_config_kwargs={"dtype": "bfloat16"}))
    (note,) = group.load(trained[1])
    assert note == "stored in float32, continued in bfloat16: values are converted"
    weights = trained[0].weights()
    assert_identical(group.weights(), {name: tensor.bfloat16() for name, tensor in weights.items()})


def test_weights_alone_go_into_another_group(start: Any, model: Path, trained: Any, tmp_path: Path) -> None:
    trained[0].save_weights(tmp_path / "weights")
    other = start(config(model))
    other.load_weights(tmp_path / "weights")
    assert_identical(other.weights(), trained[0].weights())
    with pytest.raises(ValueError, match="weights without an optimizer"):
        other.load(tmp_path / "weights")


def drawn() -> tuple[float, float, float]:
    return float(torch.rand(())), float(np.random.rand()), random.random()


def test_random_generators_come_back_with_as_many_workers_and_are_drawn_by_rank_with_others(
    trained: Any, tmp_path: Path
) -> None:
    trained[0].save(tmp_path / "saved")
    expected = drawn()
    assert drawn() != expected
    trained[0].load(tmp_path / "saved")
    assert drawn() == expected
    found = contents.read(tmp_path / "saved")
    contents.write(tmp_path / "saved", found.model_copy(update={"world_size": 2}))
    (note,) = trained[0].load(tmp_path / "saved")
    assert "saved by 2 worker(s), resumed by 1" in note and "trainer.seed" in note
    again = drawn()
    trained[0].load(tmp_path / "saved")
    assert drawn() == again != expected
    draw_random_state(42, updates=1, rank=1)
    assert drawn() != again, "another rank draws other numbers"
    draw_random_state(42, updates=1, rank=0)
    assert drawn() == again


def test_a_folder_that_is_not_the_same_on_all_machines_is_told_when_it_is_saved(saved: Path) -> None:
    alone = WorkerPlace(rank=0, world_size=1, device=torch.device("cpu"))
    files = contents.read(saved).files
    require_shared(saved, files, alone)
    with pytest.raises(OSError, match=r"is not one folder for all workers: ranks \[0\] .* trainer\.ckpt_path"):
        require_shared(saved, [*files, "tensors/__1_0.distcp"], alone)
