"""How good the served policy is on `data.val_data`: every prompt under the evaluation's sampling, scored and dumped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skyrl.train import dumps
from skyrl.train.display.progress import Progress
from skyrl.train.generator import evaluation
from skyrl.train.generator.metrics import generation_metrics
from skyrl.train.generator.trajectory import Trajectory
from skyrl.train.sources.source import WAIT_KEY
from skyrl.train.waits import Patience


async def evaluate(
    cfg: Any, *, generator: Any, dataset: Any, tokenizer: Any, progress: Progress, step: int
) -> tuple[dict[str, float], list[Trajectory], Path | None]:
    """(`eval/*` metrics, the trajectories, the folder of the dump or None). Raises what a rollout raised, or RunFailed
    where none ends in time."""
    patience = Patience(cfg.trainer.rollout_wait_timeout_s, key=WAIT_KEY)

    def moved(done: int, total: int) -> None:
        patience.moved()
        progress.waiting_for(f"evaluation {done}/{total}")

    n_samples = cfg.generator.eval_n_samples_per_prompt
    rollouts = generator.generate(
        dataset.tasks(),
        n_samples=n_samples,
        sampling=generator.eval_sampling,
        step=step,
        phase="eval",
        on_progress=moved,
    )
    trajectories = await patience.wait(rollouts, name=f"the evaluation of step {step}")
    row = evaluation.evaluation_metrics(trajectories, n_samples)
    about = generation_metrics(trajectories) | generator.metrics("eval")
    row |= {f"eval/all/{name}": value for name, value in about.items()}
    if not cfg.trainer.dump_eval_results:
        return row, trajectories, None
    return row, trajectories, dumps.dump_evaluation(Path(cfg.trainer.export_path), step, trajectories, row, tokenizer)


async def generate_only(
    cfg: Any, *, generator: Any, dataset: Any, tokenizer: Any, trackers: Any, progress: Progress
) -> tuple[dict[str, float], dict[str, Path]]:
    """(`eval/*` metrics, files) of one pass over the data with the weights that the servers have; tracked as step 0."""
    row, trajectories, dump = await evaluate(
        cfg, generator=generator, dataset=dataset, tokenizer=tokenizer, progress=progress, step=0
    )
    trackers.log(row, 0)
    if (most := cfg.trainer.num_logger_eval_samples) > 0:
        trackers.table("trajectories/eval", dumps.table_rows(0, trajectories[:most], tokenizer), 0)
    return row, {} if dump is None else {"evaluation rollouts": dump}
