"""By how much each algorithm lifts the reward of the arithmetic task in 60 steps; as a script, the table of it.

    uv run python tests/seam/algorithms_that_learn.py [NAME ...] > table.md

Every run trains the embedded run's tiny model on real parts: `skyrl-serve` samples from a transformers model, and the
weights go back to it over gRPC after each step.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from training_run import EMBEDDED, MAIN_BASE, ROOT, TrainingRun, mean

STEPS = 60
TINY_MODEL = EMBEDDED.parent / "tiny_model"
EVAL_PROMPTS, EVAL_SAMPLES = 64, 8  # 512 samples at temperature 1
TWO_UPDATES = "trainer.policy_mini_batch_size=16"  # the second one is off policy: ratios are not all 1
A = "trainer.algorithm"
CRITIC = (
    f"{A}.advantage_estimator=gae", f"trainer.critic.model.path={TINY_MODEL}",
    "trainer.critic.optimizer_config.lr=1e-3", "trainer.critic_mini_batch_size=16", TWO_UPDATES,
)  # fmt: skip

RUNS: dict[str, tuple[str, ...]] = {
    "grpo": (f"{A}.advantage_estimator=grpo",),
    "rloo": (f"{A}.advantage_estimator=rloo",),
    "reinforce++": (f"{A}.advantage_estimator=reinforce++",),
    "maxrl": (f"{A}.advantage_estimator=maxrl",),
    "gae + critic": CRITIC,
    "gae + critic, arctic_rl": (*CRITIC, "trainer.backend=arctic_rl"),
    "gspo": (f"{A}.policy_loss_type=gspo", TWO_UPDATES),
    "cispo": (f"{A}.policy_loss_type=cispo", TWO_UPDATES),
    "sapo": (f"{A}.policy_loss_type=sapo", TWO_UPDATES),
    "dual_clip": (f"{A}.policy_loss_type=dual_clip", TWO_UPDATES),
    "lora": (
        "trainer.policy.model.lora.rank=16",
        "trainer.policy.model.lora.alpha=32",
        "trainer.policy.optimizer_config.lr=3e-3",
    ),
}
"""What each run has besides the embedded run's keys."""


@dataclass(frozen=True)
class Measured:
    """Mean reward of the 512 samples before the first step, and of the samples of the last ten steps."""

    before: float
    last_ten: float
    steps: int

    @property
    def lift(self) -> float:
        return self.last_ten - self.before


def measure(folder: Path, name: str, *, wrong_sign: bool = False) -> Measured:
    """Runs `name` in `folder`, which must be empty."""
    prompts = (EMBEDDED.parent / "arithmetic_eval.jsonl").read_text().splitlines(keepends=True)[:EVAL_PROMPTS]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "eval.jsonl").write_text("".join(prompts))
    run = TrainingRun(
        folder,
        "generator.inference_engine.backend=transformers", f"trainer.max_training_steps={STEPS}", "trainer.seed=1",
        "trainer.ckpt_interval=0", "trainer.hf_save_interval=0", "trainer.eval_interval=0",
        f"data.val_data={folder / 'eval.jsonl'}", f"generator.eval_n_samples_per_prompt={EVAL_SAMPLES}",
        "generator.eval_sampling_params.temperature=1.0", *RUNS[name],
        entrypoint=[str(ROOT / "tests/seam/wrong_sign.py")] if wrong_sign else MAIN_BASE,
    ).run()  # fmt: skip
    evaluated = [row["eval/all/avg_score"] for row in run.metrics() if row["step"] == 0]
    rewards = run.rewards()
    return Measured(evaluated[0], mean(rewards[-10:]), len(rewards))


def main(names: list[str]) -> None:
    """Prints a row for each run as it ends."""
    print("| run | overrides | before | steps 51-60 | lift | lift with the wrong sign |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for index, name in enumerate(names or RUNS):
            found = measure(Path(folder) / str(index), name)
            wrong = measure(Path(folder) / f"{index}-wrong", name, wrong_sign=True)
            overrides = " ".join(f"`{each}`" for each in RUNS[name]).replace(str(TINY_MODEL), ".../tiny_model")
            overrides = overrides.replace(f"`{A}.", "`").replace("`trainer.", "`")
            lifts = (f"{found.lift:+.3f}", f"{wrong.lift:+.3f}")
            row = (name, overrides, f"{found.before:.3f}", f"{found.last_ten:.3f}", *lifts)
            print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
