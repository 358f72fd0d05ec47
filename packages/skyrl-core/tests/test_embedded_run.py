"""The run that needs nothing but the repository: its file parses, and its data are the ones that the task makes."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.config.build import build
from skyrl.train.config.overrides import parse
from skyrl.train.data import arithmetic_rows

QUICKSTART = Path(str(files("skyrl.train.quickstart")))


def test_the_file_names_a_model_and_data_that_lie_beside_it() -> None:
    cfg = build(SkyRLTrainConfig, parse([f"@{QUICKSTART / 'embedded.yaml'}"])).cfg
    named = [cfg.trainer.policy.model.path, *cfg.data.train_data, *cfg.data.val_data]
    assert all(Path(path).exists() and QUICKSTART in Path(path).parents for path in named)


def test_arguments_after_the_file_win() -> None:
    cfg = build(SkyRLTrainConfig, parse([f"@{QUICKSTART / 'embedded.yaml'}", "trainer.seed=2"])).cfg
    assert (cfg.trainer.seed, cfg.trainer.train_batch_size) == (2, 32)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_the_rows_beside_the_file_are_those_of_the_task(split: arithmetic_rows.Split) -> None:
    lines = (QUICKSTART / f"arithmetic_{split}.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == arithmetic_rows.rows(split)
