"""The run that needs nothing but the repository: what its file names lies beside it."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.config.build import build
from skyrl.train.config.overrides import parse

QUICKSTART = Path(str(files("skyrl.train.quickstart")))


def test_the_file_names_a_model_and_data_that_lie_beside_it() -> None:
    cfg = build(SkyRLTrainConfig, parse([f"@{QUICKSTART / 'embedded.yaml'}"])).cfg
    named = [cfg.trainer.policy.model.path, *cfg.data.train_data, *cfg.data.val_data]
    assert all(Path(path).exists() and QUICKSTART in Path(path).parents for path in named)


def test_arguments_after_the_file_win() -> None:
    cfg = build(SkyRLTrainConfig, parse([f"@{QUICKSTART / 'embedded.yaml'}", "trainer.seed=2"])).cfg
    assert (cfg.trainer.seed, cfg.trainer.train_batch_size) == (2, 32)
