"""A run that cannot go on from its checkpoint ends with the file and what to do, and leaves every checkpoint alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import skyrl.train.quickstart
from skyrl.train import backends
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl_rollout.reference.process import ReferenceServer

QUICKSTART = Path(skyrl.train.quickstart.__file__).parent


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ReferenceServer("--model", str(QUICKSTART / "tiny_model")) as server:
        yield server.url


def arguments(url: str, *overrides: str) -> list[str]:
    return [
        f"@{QUICKSTART / 'embedded.yaml'}", f"generator.inference_engine.external_server_urls=[{url}]",
        "generator.n_samples_per_prompt=2", "trainer.train_batch_size=4", "trainer.policy_mini_batch_size=4",
        "trainer.eval_before_train=false", "trainer.eval_interval=0", "trainer.ckpt_interval=1",
        "trainer.hf_save_interval=0", "trainer.logger=jsonl", "trainer.progress=false", "trainer.device=cpu",
        *overrides,
    ]  # fmt: skip


def run(url: str, *overrides: str) -> None:
    BasePPOExp(*backends.resolve(arguments(url, *overrides), announce=lambda line: None)).run()


@pytest.fixture
def ckpts(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two whole checkpoints."""
    monkeypatch.chdir(tmp_path)
    run(url, "trainer.max_training_steps=2")
    return tmp_path / "runs/quickstart/arithmetic/ckpts"


@pytest.mark.ci
def test_a_damaged_checkpoint_ends_the_run_with_its_file_and_the_one_before_it_is_gone_on_with(
    url: str, ckpts: Path
) -> None:
    shard = ckpts / "global_step_2/policy/tensors/__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    before = sorted(path for path in ckpts.rglob("*") if path.name != ".in-use")
    ended = subprocess.run(
        [
            sys.executable, "-m", "skyrl.train.entrypoints.main_base",
            *arguments(url, "trainer.resume_mode=latest", "trainer.max_training_steps=3"),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert ended.returncode == 1, ended.stderr
    assert f"error: {shard} is damaged" in ended.stderr
    assert "resume from another global_step_N folder with trainer.resume_mode=from_path" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert sorted(path for path in ckpts.rglob("*") if path.name != ".in-use") == before
    run(
        url,
        "trainer.resume_mode=from_path",
        f"trainer.resume_path={ckpts}/global_step_1",
        "trainer.max_training_steps=3",
    )
    assert (ckpts / "latest_ckpt_global_step.txt").read_text() == "3"


def test_latest_does_not_go_on_with_another_runs_checkpoints(url: str, ckpts: Path) -> None:
    other = ("trainer.run_name=other", f"trainer.ckpt_path={ckpts}", "trainer.max_training_steps=3")
    with pytest.raises(ValueError, match=r"another run: trainer\.run_name \(arithmetic -> other\).*from_path"):
        run(url, *other, "trainer.resume_mode=latest")
    run(url, *other, "trainer.resume_mode=from_path", f"trainer.resume_path={ckpts}/global_step_2")
    assert (ckpts / "latest_ckpt_global_step.txt").read_text() == "3"


def test_without_a_reference_that_the_run_had_the_file_is_named(url: str, ckpts: Path) -> None:
    state = ckpts / "global_step_2/trainer_state.json"
    state.write_text(state.read_text().replace('"reference_epochs": 0', '"reference_epochs": 1'))
    with pytest.raises(ValueError, match=r"global_step_2/ref/contents\.json is missing"):
        run(
            url, "trainer.resume_mode=latest", "trainer.max_training_steps=3", "trainer.algorithm.use_kl_loss=true",
            "trainer.update_ref_every_epoch=true",
        )  # fmt: skip
