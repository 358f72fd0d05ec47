"""A run has its folders to itself, and knows before it starts that it can write into them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.run_folders import IN_USE, held, used


def config(folder: Path, **trainer: object) -> SkyRLTrainConfig:
    paths = {f"{name}_path": str(folder / name) for name in ("ckpt", "export", "log")}
    return SkyRLTrainConfig.model_validate({"trainer": paths | {"hf_save_interval": 1} | trainer})


def refused(cfg: SkyRLTrainConfig) -> str:
    with pytest.raises(ValueError, match="trainer") as caught, held(cfg):
        pass
    return str(caught.value)


def test_two_runs_do_not_write_into_one_folder(tmp_path: Path) -> None:
    second = config(tmp_path, log_path=str(tmp_path / "other"))
    with held(config(tmp_path)):
        told = refused(second)
    assert f"trainer.ckpt_path={tmp_path / 'ckpt'}: another run writes into it (process {os.getpid()} on" in told
    with held(second):
        pass


def test_one_folder_may_serve_a_run_for_all(tmp_path: Path) -> None:
    with held(config(tmp_path, ckpt_path=str(tmp_path), export_path=str(tmp_path), log_path=str(tmp_path))):
        assert (tmp_path / IN_USE).is_file()


@pytest.mark.parametrize("name", ["ckpt", "export", "log"])
def test_a_folder_that_cannot_be_made_is_told_with_its_key(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("a file")
    assert f"trainer.{name}_path={tmp_path / name}: cannot be written to: File exists" in refused(config(tmp_path))


def test_a_folder_that_nothing_is_written_into_is_not_made(tmp_path: Path) -> None:
    cfg = config(tmp_path, ckpt_interval=0, hf_save_interval=0, dump_eval_results=False)
    assert list(used(cfg)) == ["trainer.log_path"]
