"""From the same rollouts, FSDP and DeepSpeed take the same steps."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from skyrl_rollout.reference.process import ReferenceServer
from training_run import ROOT, TrainingRun
from vllm_server import TINY_MODEL

FIVE_STEPS = (
    "trainer.max_training_steps=5",
    "trainer.train_batch_size=8",
    "trainer.policy_mini_batch_size=8",
    "generator.n_samples_per_prompt=4",
    "environment.env_class=varied_reward",
    "environment.plugins=[varied_reward]",
    "trainer.eval_interval=-1",
    "trainer.eval_before_train=false",
    "trainer.ckpt_interval=-1",
    "trainer.hf_save_interval=5",
)


def exported(run: TrainingRun, step: int) -> dict[str, torch.Tensor]:
    return load_file(run.folder / f"exports/global_step_{step}/policy/model.safetensors")


def five_steps(folder: Path, *overrides: str) -> TrainingRun:
    """Rollouts of the reference server do not depend on the weights: equal seeds give equal tokens."""
    with ReferenceServer("--model", str(TINY_MODEL)) as server:
        run = TrainingRun(
            folder, *FIVE_STEPS, f"generator.inference_engine.external_server_urls=[{server.url}]", *overrides
        )
        run.start(PYTHONPATH=str(ROOT / "tests/seam"))
        code = run.wait(300)
        assert code == 0, run.output[-4000:]
    return run


def assert_same_steps(one: TrainingRun, other: TrainingRun) -> None:
    assert one.rewards() == other.rewards()
    assert len(set(one.rewards())) == 5, "the reward must vary, or there is nothing to agree on"
    before = load_file(TINY_MODEL / "model.safetensors")
    a, b = exported(one, 5), exported(other, 5)
    assert a.keys() == b.keys()
    largest = max(float((a[n] - b[n]).abs().max()) for n in a)
    moved = max(float((a[n] - before[n]).abs().max()) for n in a)
    assert moved > 1e-4, "five AdamW steps must move the weights"
    assert largest <= 1e-5, f"weights after 5 steps differ by {largest:.2e}"


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_one_worker_each(tmp_path: Path) -> None:
    fsdp = five_steps(tmp_path / "fsdp", "trainer.backend=fsdp")
    arctic = five_steps(tmp_path / "arctic", "trainer.backend=arctic_rl")
    assert_same_steps(fsdp, arctic)


@pytest.mark.ci
@pytest.mark.timeout(900)
def test_two_ranks_under_ray(tmp_path: Path) -> None:
    two = "trainer.placement.policy_num_gpus_per_node=2"
    fsdp = five_steps(tmp_path / "fsdp", "trainer.backend=fsdp", two)
    arctic = five_steps(tmp_path / "arctic", "trainer.backend=arctic_rl", two)
    assert_same_steps(fsdp, arctic)
    one = five_steps(tmp_path / "one", "trainer.backend=fsdp")
    assert_same_steps(fsdp, one)
