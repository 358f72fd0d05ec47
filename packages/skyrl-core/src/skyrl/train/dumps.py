"""Rollouts and batches as files that a person can open: evaluation results, training batches, one example as text."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from skyrl.train.generator.evaluation import source_name
from skyrl.train.generator.trajectory import Trajectory
from skyrl.train.policy.batch import TrajectoryBatch

EXAMPLE_CHARS = 400


def dump_evaluation(
    folder: Path,
    step: int,
    trajectories: Sequence[Trajectory],
    metrics: Mapping[str, float],
    tokenizer: Any,
) -> Path:
    """`dumped_evals/global_step_N_evals/<data source>.jsonl`, one line per rollout, and `aggregated_results.jsonl`."""
    target = folder / "dumped_evals" / f"global_step_{step}_evals"
    by_source: dict[str, list[Trajectory]] = defaultdict(list)
    for t in trajectories:
        by_source[source_name(t.data_source)].append(t)
    for source, rows in by_source.items():
        _write_lines(target / f"{source}.jsonl", rows, tokenizer)
    (target / "aggregated_results.jsonl").write_text(json.dumps(dict(metrics)) + "\n", encoding="utf-8")
    return target


def dump_trajectories(folder: Path, step: int, trajectories: Sequence[Trajectory], tokenizer: Any) -> Path:
    """`dumped_data/global_step_N_trajectories.jsonl`, one line per rollout of the training batch."""
    target = folder / "dumped_data" / f"global_step_{step}_trajectories.jsonl"
    _write_lines(target, trajectories, tokenizer)
    return target


def table_rows(step: int, trajectories: Sequence[Trajectory], tokenizer: Any) -> list[dict[str, Any]]:
    """Rollouts as rows of a tracker's table: step, idx, reward, num_turns, trajectory (prompt and response as text)."""
    return [
        {
            "step": step,
            "idx": index,
            "reward": t.total_reward,
            "num_turns": t.num_turns,
            "trajectory": tokenizer.decode(np.concatenate([t.prompt_token_ids, t.response_token_ids]).tolist()),
        }
        for index, t in enumerate(trajectories)
    ]


def dump_batch(folder: Path, step: int, batch: TrajectoryBatch) -> Path:
    """`dumped_data/global_step_N_training_input.npz`: every tensor of the batch under its field name."""
    target = folder / "dumped_data" / f"global_step_{step}_training_input.npz"
    target.parent.mkdir(parents=True, exist_ok=True)
    named = {f.name: getattr(batch, f.name) for f in fields(batch)}
    np.savez(
        target,
        **{name: tensor.numpy() for name, tensor in named.items() if tensor is not None},
    )
    return target


def example(trajectory: Trajectory, tokenizer: Any) -> str:
    """One rollout on three lines, long texts cut in the middle."""
    row = _row(trajectory, tokenizer)
    prompt, response = _cut(row["input_prompt"]), _cut(row["output_response"])
    return f"example: {prompt!r}\n      -> {response!r}\n  reward {row['score']:g}, ended by {row['stop_reason']}"


def _write_lines(path: Path, trajectories: Sequence[Trajectory], tokenizer: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for t in trajectories:
            # a column that JSON does not know, such as a date, is written as text
            file.write(json.dumps(_row(t, tokenizer), ensure_ascii=False, default=str) + "\n")


def _row(t: Trajectory, tokenizer: Any) -> dict[str, Any]:
    return {
        "input_prompt": tokenizer.decode(t.prompt_token_ids.tolist()),
        "output_response": tokenizer.decode(t.response_token_ids.tolist()),
        "score": t.total_reward,
        "stop_reason": t.stop_reason,
        "env_class": t.env_class,
        "env_extras": t.env_extras,
        "data_source": t.data_source,
        "uid": t.id.uid,
        "repetition": t.id.repetition,
        "messages": t.messages,
    }


def _cut(text: str) -> str:
    half = EXAMPLE_CHARS // 2
    return text if len(text) <= EXAMPLE_CHARS else f"{text[:half]} ... {text[-half:]}"
