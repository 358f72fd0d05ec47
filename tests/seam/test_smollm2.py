"""A real chat model trains for nine steps without a GPU or a model hub: the example, as it stands."""

import subprocess
from pathlib import Path

import pytest
from training_run import ROOT, TrainingRun, mean

EXAMPLE = "packages/skyrl-arctic/examples/run_smollm2_grpo.sh"
LARGEST_GAP = 2e-5  # mean |trainer - server| logprob of a step, in nats


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_nine_steps_on_smollm2_lift_the_reward(tmp_path: Path) -> None:
    places = [f"trainer.{kind}_path={tmp_path}/{folder}" for kind, folder in (("log", "logs"), ("ckpt", "ckpts"))]
    command = ["bash", EXAMPLE, *places, f"trainer.export_path={tmp_path}/exports", "trainer.logger=[jsonl]"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2300)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert "trainer/global_step: 9" in ran.stdout
    run = TrainingRun(tmp_path)
    assert sorted(run.steps()) == list(range(1, 10))
    rewards = run.rewards()
    assert mean(rewards[4:]) > mean(rewards[:4])
    gaps = [row["policy/rollout_train_logprobs_abs_diff_mean"] for row in run.steps().values()]
    assert max(gaps) <= LARGEST_GAP, f"largest mean |trainer - server| logprob of a step: {max(gaps):.2e}"
