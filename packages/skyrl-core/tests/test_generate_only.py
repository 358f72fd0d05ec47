"""A run that trains nothing: what it leaves, and that the servers are as they were."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import skyrl.train.quickstart
from skyrl.train import backends
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints import main_generate
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.entrypoints.run_folders import used
from skyrl.train.environments import EnvironmentFailed
from skyrl_rollout.client import RolloutClient
from small_runs import BACKENDS, CodesEnv, arguments

EMBEDDED = Path(skyrl.train.quickstart.__file__).parent / "embedded.yaml"
EXAMPLE = Path(__file__).parents[1] / "examples" / "generate_only.yaml"
LEFT = "runs/quickstart/arithmetic-generate-only"


async def state_of(url: str) -> tuple[Any, ...]:
    """The versions that a server has, and its last owner's epoch."""
    client = await RolloutClient.connect(url, timeout_s=10)
    try:
        return client.info.weight_versions, client.info.highest_trainer_epoch
    finally:
        await client.close()


@pytest.mark.parametrize("backend", BACKENDS)
async def test_the_servers_are_asked_and_neither_owned_nor_changed(
    backend: str, reference_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = await state_of(reference_url)
    argv = [f"@{EMBEDDED}", f"@{EXAMPLE}", f"trainer.backend={backend}", "trainer.logger=jsonl",
            f"generator.inference_engine.external_server_urls={reference_url}", "trainer.progress=false"]  # fmt: skip
    await asyncio.to_thread(main_generate.main, argv)
    assert await state_of(reference_url) == before
    (row,) = [json.loads(line) for line in (tmp_path / LEFT / "logs/metrics.jsonl").read_text().splitlines()]
    assert {"eval/all/avg_score", "eval/all/pass_at_4", "eval/all/generate/batch_num_seq"} <= set(row)
    dump = tmp_path / LEFT / "exports/dumped_evals/global_step_0_evals"
    rollouts = [json.loads(line) for line in (dump / "arithmetic.jsonl").read_text().splitlines()]
    assert len(rollouts) == row["eval/all/generate/batch_num_seq"] == 4 * 100
    groups = {r["uid"]: set() for r in rollouts}
    for r in rollouts:
        groups[r["uid"]].add(r["output_response"])
    assert max(map(len, groups.values())) > 1, "at temperature 1 the samples of a prompt differ"
    assert (
        json.loads((dump / "aggregated_results.jsonl").read_text())["eval/all/avg_score"] == row["eval/all/avg_score"]
    )
    assert not (tmp_path / LEFT / "ckpts").exists()


def test_trackers_hear_of_a_run_that_failed(
    reference_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(CodesEnv, "broken", True)
    events = tmp_path / "events"
    monkeypatch.setenv("TENSORBOARD_DIR", str(events))
    argv = arguments(reference_url, "trainer.mode=generate", "trainer.logger=tensorboard")
    cfg, plugin = backends.resolve(argv, announce=lambda line: None)
    with pytest.raises(EnvironmentFailed):
        BasePPOExp(cfg, plugin).run()
    assert any(b"the judge is away" in file.read_bytes() for file in events.iterdir())


@pytest.mark.ci
def test_a_server_of_its_own_is_started_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = [f"@{EMBEDDED}", f"@{EXAMPLE}", "trainer.logger=jsonl", "trainer.progress=false"]
    main_generate.main([*argv, "generator.eval_n_samples_per_prompt=1"])
    shown = capsys.readouterr().out
    score = float(next(line for line in shown.splitlines() if line.startswith("eval/all/avg_score:")).split()[-1])
    assert 0 < score < 1, "the tiny model solves some of the sums"
    assert "evaluation rollouts: " in shown


def test_only_what_is_written_is_taken() -> None:
    cfg = SkyRLTrainConfig.from_cli_overrides(["trainer.mode=generate"])
    assert set(used(cfg)) == {"trainer.log_path", "trainer.export_path"}
    assert BasePPOExp(cfg).generates_only
