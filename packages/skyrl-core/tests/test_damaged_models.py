"""A model folder that is incomplete or damaged is refused with its path and what is wrong in it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import skyrl.train.quickstart
import torch
from skyrl.train import checkpoints
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.policy import hf_files
from skyrl.train.policy.fsdp.model import load

TINY_MODEL = Path(skyrl.train.quickstart.__file__).parent / "tiny_model"


def cut_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])


def change_config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


def change_header(folder: Path) -> None:
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[8:12] = b"\xff\xff\xff\xff"
    weights.write_bytes(content)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY_MODEL, tmp_path / "model"))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (
            cut_weights,
            r"cannot be loaded: .*/model.safetensors is damaged \(100000 bytes of \d+\): take another",
        ),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 7), "7 bytes without a whole header"),
        (change_header, "is damaged .its header is no JSON of tensors"),
        (lambda folder: (folder / "model.safetensors").unlink(), "cannot be loaded as a causal LM"),
        (change_config(model_type="zzz"), "model type `zzz`"),
        (
            change_config(num_hidden_layers=6, layer_types=["full_attention"] * 6),
            "model.layers.4.input_layernorm.weight is not there; .* and 19 more",
        ),
        (change_config(intermediate_size=100), r"mlp.down_proj.weight is \[128, 384\], not \[128, 100\]"),
    ],
    ids=[
        "cut",
        "cut in its header",
        "changed header",
        "no weights",
        "unknown architecture",
        "layers missing",
        "other shapes",
    ],
)
def test_a_damaged_model_is_told_with_its_key(folder: Path, damage: Callable[[Path], None], told: str) -> None:
    damage(folder)
    with pytest.raises(ValueError, match=f"trainer.ref.model.path={folder}.*{told}"):
        load(str(folder), dtype=torch.float32, overrides={}, key="trainer.ref.model.path")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda folder: [path.unlink() for path in folder.glob("tokenizer*")], "there is no tokenizer in it"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "its tokenizer cannot be loaded"),
    ],
    ids=["missing", "damaged"],
)
def test_a_model_without_its_tokenizer_is_told(folder: Path, damage: Callable[[Path], None], told: str) -> None:
    damage(folder)
    cfg = SkyRLTrainConfig.model_validate({"trainer": {"policy": {"model": {"path": str(folder)}}}})
    with pytest.raises(ValueError, match=f"trainer.policy.model.path={folder}: {told}"):
        BasePPOExp(cfg).get_tokenizer()


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda folder: (folder / "model-00002-of-00003.safetensors").unlink(), "model-00002-of-00003.* is missing"),
        (lambda folder: (folder / hf_files.INDEX).write_text('{"weight_map": '), "index.json is damaged"),
        (lambda folder: (folder / hf_files.INDEX).write_text("[]"), "index.json is damaged"),
    ],
    ids=["shard missing", "index cut", "no index"],
)
def test_a_checkpoint_of_several_files_names_the_one_to_blame(
    tmp_path: Path, damage: Callable[[Path], None], told: str
) -> None:
    whole = load(str(TINY_MODEL), dtype=torch.float32, overrides={}, key="trainer.policy.model.path")
    folder = tmp_path / "model"
    whole.save_pretrained(folder, max_shard_size="1500KB")
    assert len(list(folder.glob("*.safetensors"))) == 3
    load(str(folder), dtype=torch.float32, overrides={}, key="trainer.policy.model.path")
    damage(folder)
    with pytest.raises(ValueError, match=f"trainer.policy.model.path={folder} cannot be loaded: .*{told}"):
        load(str(folder), dtype=torch.float32, overrides={}, key="trainer.policy.model.path")


def test_an_export_that_was_interrupted_is_not_taken_for_a_whole_one(folder: Path) -> None:
    unfinished = folder.rename(folder.with_name(f".policy{checkpoints.PARTIAL}"))
    with pytest.raises(ValueError, match="it is an export that was never finished: take another export"):
        load(str(unfinished), dtype=torch.float32, overrides={}, key="trainer.policy.model.path")
