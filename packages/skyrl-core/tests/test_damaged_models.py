"""A model folder that is incomplete or damaged is refused with its path and what is wrong in it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import skyrl.train.quickstart
import torch
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY_MODEL, tmp_path / "model"))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (cut_weights, "cannot be loaded as a causal LM"),
        (lambda folder: (folder / "model.safetensors").unlink(), "cannot be loaded as a causal LM"),
        (change_config(model_type="zzz"), "model type `zzz`"),
        (
            change_config(num_hidden_layers=6, layer_types=["full_attention"] * 6),
            "model.layers.4.input_layernorm.weight is not there; .* and 19 more",
        ),
        (change_config(intermediate_size=100), r"mlp.down_proj.weight is \[128, 384\], not \[128, 100\]"),
    ],
    ids=["cut", "no weights", "unknown architecture", "layers missing", "other shapes"],
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
