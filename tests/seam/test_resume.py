"""A killed run goes on at its last checkpoint as if nothing had happened."""

import signal
from pathlib import Path

import pytest
from skyrl_rollout.reference.process import ReferenceServer
from test_backends_agree import FIVE_STEPS
from training_run import ROOT, TrainingRun, all_gone
from vllm_server import TINY_MODEL

STEPS = 40
KILL_AT = 30


def run_of(folder: Path, *overrides: str) -> TrainingRun:
    return TrainingRun(
        folder,
        *FIVE_STEPS,
        f"trainer.max_training_steps={STEPS}",
        f"trainer.hf_save_interval={STEPS}",
        "trainer.ckpt_interval=8",
        *overrides,
    )


def start(run: TrainingRun) -> TrainingRun:
    return run.start(PYTHONPATH=str(ROOT / "tests/seam"))


def assert_killed_and_resumed_equals(whole: TrainingRun, folder: Path, *overrides: str) -> None:
    killed = start(run_of(folder, *overrides))
    killed.wait_for_step(KILL_AT)
    children = killed.descendants()
    killed.kill()
    assert not all_gone(children), "the trainer's own server outlived it"
    before = killed.steps()
    resumed = start(run_of(folder, "trainer.resume_mode=latest", *overrides))
    assert resumed.wait(300) == 0, resumed.output[-4000:]
    assert "resuming at step 24" in resumed.output or "resuming at step 32" in resumed.output
    assert resumed.rewards() == whole.rewards()
    assert {s: row["reward/avg_raw_reward"] for s, row in before.items()}.items() <= {
        s: row["reward/avg_raw_reward"] for s, row in whole.steps().items()
    }.items()
    name = f"exports/global_step_{STEPS}/policy/model.safetensors"
    assert (resumed.folder / name).read_bytes() == (whole.folder / name).read_bytes()


@pytest.mark.ci
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["fsdp", "arctic_rl"])
def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path, backend: str) -> None:
    own = (f"trainer.backend={backend}", "generator.inference_engine.backend=reference")
    whole = start(run_of(tmp_path / "whole", *own))
    assert whole.wait(300) == 0, whole.output[-4000:]
    assert_killed_and_resumed_equals(whole, tmp_path / "own", *own)
    with ReferenceServer("--model", str(TINY_MODEL), "--logits", "canary") as server:
        url = f"generator.inference_engine.external_server_urls=[{server.url}]"
        assert_killed_and_resumed_equals(whole, tmp_path / "external", f"trainer.backend={backend}", url)


@pytest.mark.ci
@pytest.mark.timeout(300)
@pytest.mark.parametrize("after_step", [0, 1, 3])
def test_ctrl_c_leaves_nothing_running(tmp_path: Path, after_step: int) -> None:
    run = start(run_of(tmp_path, "generator.inference_engine.backend=reference"))
    if after_step:
        run.wait_for_step(after_step)
    else:
        run.wait_for_output("honoured")
    children = run.descendants()
    run.signal(signal.SIGINT)
    assert run.wait(60) == 130
    assert not all_gone(children)
    assert "Traceback" not in run.output
