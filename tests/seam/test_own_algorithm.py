"""A user's script that registers an estimator and losses runs on both backends, in this process and in workers."""

from pathlib import Path

import pytest
from skyrl_rollout.reference.process import ReferenceServer
from training_run import ROOT, TrainingRun
from vllm_server import TINY_MODEL

OWN = (
    "trainer.algorithm.advantage_estimator=batch_baseline", "environment.env_class=varied_reward",
    "generator.inference_engine.backend=reference", "generator.n_samples_per_prompt=2", "trainer.train_batch_size=4",
    "trainer.policy_mini_batch_size=4", "trainer.max_training_steps=2", "trainer.eval_before_train=false",
    "trainer.eval_interval=0", "trainer.ckpt_interval=0", "trainer.hf_save_interval=0",
    f"trainer.policy.model.path={TINY_MODEL}",
)  # fmt: skip


def gradient_norms(folder: Path, loss: str, *overrides: str, rank: float = 0.0) -> list[float]:
    """Of two steps along `loss`, of which `rank` was the last rank."""
    script = [str(ROOT / "tests/seam/own_algorithm.py")]
    run = TrainingRun(folder, *OWN, f"trainer.algorithm.policy_loss_type={loss}", *overrides, entrypoint=script).run()
    rows = list(run.steps().values())
    assert [row["policy/loss_metrics/rank_max"] for row in rows] == [rank, rank]
    return [row["policy/grad_norm"] for row in rows]


@pytest.mark.parametrize(
    "backend", [pytest.param("fsdp", marks=pytest.mark.long), pytest.param("arctic_rl", marks=pytest.mark.ci)]
)
def test_an_estimator_and_a_loss_of_a_users_script_run(tmp_path: Path, backend: str) -> None:
    norms = gradient_norms(tmp_path, "reinforce", f"trainer.backend={backend}")
    assert min(norms) > 0


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", ["fsdp", "arctic_rl"])
def test_both_forms_of_a_users_loss_take_the_same_steps_in_worker_processes(tmp_path: Path, backend: str) -> None:
    # what a plain server says does not depend on the weights, whose last bit differs with the number of ranks
    with ReferenceServer("--model", str(TINY_MODEL)) as server:
        on = (f"trainer.backend={backend}", f"generator.inference_engine.external_server_urls={server.url}")
        two = (*on, "trainer.placement.policy_num_gpus_per_node=2")
        alone = gradient_norms(tmp_path / "alone", "reinforce", *on)
        flat = gradient_norms(tmp_path / "flat", "reinforce", *two, rank=1.0)
        padded = gradient_norms(tmp_path / "padded", "reinforce_sum", *two, rank=1.0)
    assert flat == pytest.approx(alone, rel=1e-4) and padded == pytest.approx(flat, rel=1e-4)
