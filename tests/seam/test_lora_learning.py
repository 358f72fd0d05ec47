"""A LoRA adapter learns: reward climbs, and trainer and server agree on every token."""

from pathlib import Path

import pytest
from training_run import TrainingRun, mean

LORA = (
    "trainer.policy.model.lora.rank=16",
    "trainer.policy.model.lora.alpha=32",
    "trainer.policy.optimizer_config.lr=3e-3",
    "trainer.max_training_steps=60",
    "generator.eval_sampling_params.temperature=1.0",
)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["arctic_rl", "fsdp"])
@pytest.mark.parametrize("server", ["vllm", "transformers"])
def test_sixty_steps_of_an_adapter_lift_the_reward(tmp_path: Path, backend: str, server: str) -> None:
    run = TrainingRun(
        tmp_path, *LORA, f"trainer.backend={backend}", f"generator.inference_engine.backend={server}"
    ).run()
    start = next(row["eval/all/avg_score"] for row in run.metrics() if row["step"] == 0)
    end = mean(run.rewards()[-10:])
    assert end >= start + 0.2, f"evaluation at step 0 {start:.3f}, last ten steps {end:.3f}"
    gaps = [row["policy/rollout_train_logprobs_abs_diff_mean"] for row in run.steps().values()]
    assert max(gaps) <= 1e-6, f"largest mean |trainer - rollout| logprob of a step: {max(gaps):.2e}"
