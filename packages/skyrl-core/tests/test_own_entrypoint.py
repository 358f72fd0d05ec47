"""The example of an entrypoint of one's own on every installed backend, in one process and with two Ray workers."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from skyrl.train.entrypoints.main_base import in_front_of
from skyrl.train.trainer import RayPPOTrainer
from skyrl_gym.envs import registration
from small_runs import BACKENDS

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_entrypoint.py"
SMALL = (
    "trainer.train_batch_size=8", "trainer.policy_mini_batch_size=8", "generator.n_samples_per_prompt=4",
    "trainer.max_training_steps=2", "trainer.eval_before_train=false", "trainer.eval_interval=0",
    "trainer.ckpt_interval=0", "trainer.hf_save_interval=0", "trainer.logger=jsonl", "trainer.progress=false",
    "trainer.device=cpu", "trainer.algorithm.ratio_limit=0.9",
)  # fmt: skip


def rows_below(folder: Path) -> list[dict[str, float]]:
    (log,) = folder.glob("runs/quickstart/own-entrypoint/logs/metrics.jsonl")
    return [json.loads(line) for line in log.read_text().splitlines()]


def assert_its_parts_were_used(rows: list[dict[str, float]]) -> None:
    assert [row["step"] for row in rows] == [1, 2]
    # with this limit the loss clips every token of the first update: its ratio is 1
    assert rows[0]["policy/loss_metrics/share_above"] == pytest.approx(1.0)
    assert all(row["policy/num_skipped_updates"] == 0 for row in rows)


@pytest.mark.parametrize("backend", BACKENDS)
def test_its_environment_loss_key_and_trainer_are_used_on_every_backend(
    backend: str, reference_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registration, "registry", dict(registration.registry))
    url = f"generator.inference_engine.external_server_urls={reference_url}"
    argv = [str(EXAMPLE), url, f"trainer.backend={backend}", *SMALL]
    monkeypatch.setattr(sys, "argv", argv)
    used: list[str] = []
    monkeypatch.setattr(RayPPOTrainer, "advantages", _noting(RayPPOTrainer.advantages, used))
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert_its_parts_were_used(rows_below(tmp_path))
    assert used[0].startswith("OwnTrainer")


def _noting(method, used):
    def advantages(self, batch):
        used.append(type(self).__name__)
        return method(self, batch)

    return advantages


@pytest.mark.long  # test_ray_group.py proves in CI that a registered loss reaches the workers
@pytest.mark.timeout(300)
def test_its_loss_reaches_two_workers_under_ray(reference_url: str, tmp_path: Path) -> None:
    url = f"generator.inference_engine.external_server_urls={reference_url}"
    workers = "trainer.placement.policy_num_gpus_per_node=2"
    run = subprocess.run(
        [sys.executable, EXAMPLE, url, workers, *SMALL], cwd=tmp_path, capture_output=True, text=True, timeout=250,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert_its_parts_were_used(rows_below(tmp_path))


def test_a_class_of_ones_own_stands_before_the_backends() -> None:
    class Backends(RayPPOTrainer):
        def record(self): ...

    class Own(RayPPOTrainer):
        def advantages(self, batch): ...

    class Both(Backends): ...

    assert in_front_of(None, Backends) is Backends
    assert in_front_of(Both, Backends) is Both
    assert in_front_of(RayPPOTrainer, Backends) is Backends
    made = in_front_of(Own, Backends)
    assert made.advantages is Own.advantages and made.record is Backends.record
