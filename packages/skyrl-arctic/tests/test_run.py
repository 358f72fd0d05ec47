"""Whole runs through the backend's own door against the reference server: they end cleanly and resume bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from skyrl.train.policy.checkpoint import contents
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.ci

TIMEOUT_S = 300


def run(folder: Path, *overrides: str) -> str:
    """The output of `python -m arctic_rl.entrypoint` on the embedded run, a few steps of it, in `folder`."""
    argv = [
        f"@{files('skyrl.train.quickstart') / 'embedded.yaml'}",
        "generator.inference_engine.backend=reference",
        "trainer.device=cpu",
        "trainer.eval_before_train=false",
        "trainer.eval_interval=-1",
        "trainer.train_batch_size=8",
        "trainer.policy_mini_batch_size=4",
        "generator.n_samples_per_prompt=4",
        "trainer.ckpt_interval=2",
        "trainer.hf_save_interval=2",
        *overrides,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "arctic_rl.entrypoint", *argv],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def of_run(folder: Path, *parts: str) -> Path:
    return folder.joinpath("runs", "quickstart", "arithmetic", *parts)


def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path: Path) -> None:
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    straight.mkdir()
    stopped.mkdir()
    shown = run(straight, "trainer.max_training_steps=4", "trainer.arctic_rl.zero_stage=2")
    assert "trainer/global_step: 4" in shown
    run(stopped, "trainer.max_training_steps=2", "trainer.arctic_rl.zero_stage=2")
    resume = ("trainer.max_training_steps=4", "trainer.resume_mode=latest", "trainer.arctic_rl.zero_stage=2")
    assert "resuming at step 2" in run(stopped, *resume)
    export = of_run(straight, "exports", "global_step_4", "policy")
    expected = load_file(export / "model.safetensors")
    resumed = load_file(of_run(stopped, "exports", "global_step_4", "policy", "model.safetensors"))
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(export), AutoTokenizer.from_pretrained(export)
    assert len(tokenizer("47+8=")["input_ids"]) == 5
    trained_from = load_file(Path(str(files("skyrl.train.quickstart") / "tiny_model" / "model.safetensors")))
    assert any(not torch.equal(trained_from[name], expected[name]) for name in expected)
    assert model.dtype == torch.float32


def test_every_minibatch_of_a_step_is_an_optimizer_step_also_beside_a_reference(tmp_path: Path) -> None:
    run(
        tmp_path, "trainer.max_training_steps=2", "trainer.algorithm.use_kl_loss=true", "trainer.arctic_rl.zero_stage=0"
    )
    found = contents.read(of_run(tmp_path, "ckpts", "global_step_2", "policy"))
    assert {entry.steps for entry in found.tensors.values()} == {4}, "2 steps of 8 prompts in mini-batches of 4"
