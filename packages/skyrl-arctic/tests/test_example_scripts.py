"""Whether the GSM8K scripts are valid, small by one flag, and equal to their twins but for the backend."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from skyrl.train import backends
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl_rollout.reference.process import ReferenceServer

pytestmark = [pytest.mark.ci, pytest.mark.timeout(120)]
ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "packages/skyrl-arctic/examples"
TINY_MODEL = ROOT / "packages/skyrl-core/src/skyrl/train/quickstart/tiny_model"
SIZES = ("4gpu", "1gpu_colocated")
STARTED = {
    "": ["run", "--package", "skyrl-arctic", "train"],
    "_fsdp": ["run", "--package", "skyrl-core", "python", "-m", "skyrl.train.entrypoints.main_base"],
}
TWINS_DIFFER_IN = {
    "trainer.backend", "trainer.strategy", "trainer.arctic_rl.zero_stage", "trainer.run_name", "trainer.ckpt_path",
    "trainer.export_path", "trainer.log_path",
}  # fmt: skip


def arguments(size: str, twin: str, folder: Path, *flags: str) -> list[str]:
    """What the script hands over to the trainer: `uv` is a script that writes down what it was called with."""
    folder.mkdir(exist_ok=True)
    told = folder / "arguments"
    (folder / "uv").write_text(f'#!/bin/sh\nprintf "%s\\0" "$@" > {told}\n')
    (folder / "uv").chmod(0o755)
    subprocess.run(
        ["bash", EXAMPLES / f"run_gsm8k_grpo_{size}{twin}.sh", *flags],
        env={**os.environ, "LOGGER": "console", "PATH": f"{folder}:{os.environ['PATH']}"},
        check=True,
        timeout=30,
    )
    called = told.read_text().split("\0")[:-1]
    start = STARTED[twin]
    assert called[: len(start)] == start
    backend = [] if twin else ["trainer.backend=arctic_rl"]
    return [*backend, *(word.replace("@packages/", f"@{ROOT}/packages/") for word in called[len(start) :])]


def resolved(argv: list[str]) -> dict[str, Any]:
    return dict(leaves(backends.resolve(argv, announce=lambda line: None)[0].model_dump()))


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def differences(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    return {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)}


@pytest.mark.parametrize("size", SIZES)
def test_twins_differ_in_their_backend_only(size: str, tmp_path: Path) -> None:
    arctic, fsdp = (resolved(arguments(size, twin, tmp_path)) for twin in STARTED)
    differing = {key for key in differences(arctic, fsdp) if not key.startswith("trainer.arctic_rl")}
    assert "trainer.backend" in differing and differing <= TWINS_DIFFER_IN


@pytest.mark.parametrize("size", SIZES)
def test_the_cpu_flag_changes_what_its_file_says_and_nothing_else(size: str, tmp_path: Path) -> None:
    whole, small = (resolved(arguments(size, "", tmp_path, *flags)) for flags in ((), ("--cpu",)))
    written = set(dict(leaves(yaml.safe_load((EXAMPLES / "gsm8k_cpu.yaml").read_text()))))
    # the longest prompt, the policy's model, and a table that is empty without the file
    follows = {
        "generator.max_input_length",
        "trainer.ref.model.path",
        "generator.inference_engine.engine_init_kwargs",
    }
    assert differences(whole, small) <= written | follows
    assert {"trainer.algorithm.use_kl_loss", "environment.env_class"}.isdisjoint(written)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ReferenceServer("--model", str(TINY_MODEL), "--logits", "canary") as server:
        yield server.url


@pytest.mark.parametrize(("size", "twin"), [("4gpu", ""), ("1gpu_colocated", "_fsdp")])
def test_with_the_cpu_flag_it_takes_two_steps(
    size: str, twin: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mine = (
        f"generator.inference_engine.external_server_urls={url}",
        "generator.inference_engine.run_engines_locally=false",
        f"trainer.ckpt_path={tmp_path}/ckpts",
        "trainer.logger=jsonl",
        "trainer.progress=false",
    )
    argv = arguments(size, twin, tmp_path / "called", "--cpu", *mine)
    cfg, plugin = backends.resolve(argv, announce=lambda line: None)
    BasePPOExp(cfg, plugin).run()
    rows = [json.loads(line) for line in (cfg.trainer.log_folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "reward/avg_raw_reward" in row]
    assert [row["trainer/global_step"] for row in steps] == [1, 2]
    assert all("policy/policy_kl" in row and "policy/rollout_train_logprobs_abs_diff_mean" in row for row in steps)
