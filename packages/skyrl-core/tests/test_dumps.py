"""Whether rollouts and batches are left as files under their public names, each row with all that it is made of."""

import datetime
import json

import numpy as np
from skyrl.train import dumps
from skyrl.train.generator.trajectory import Trajectory, TrajectoryID


def trajectory(tokenizer, source: str = "owner/set", **extras) -> Trajectory:
    answer = np.array(tokenizer.encode("3", add_special_tokens=False), np.int32)
    return Trajectory(
        TrajectoryID("7", 1),
        prompt_token_ids=np.array(tokenizer.encode("1+1=", add_special_tokens=False), np.int32),
        response_token_ids=answer,
        loss_mask=np.ones(1, np.float32),
        rewards=np.full(1, 0.5, np.float32),
        rollout_logprobs=np.zeros(1, np.float32),
        weight_versions=np.ones(1, np.int64),
        stop_reason="stop",
        env_class="gsm8k",
        env_extras=extras,
        data_source=source,
        messages=[{"role": "assistant", "content": "3"}],
    )


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_evaluation_leaves_a_file_per_source_and_its_scores(tmp_path, tiny_tokenizer):
    rollouts = [trajectory(tiny_tokenizer, level=2), trajectory(tiny_tokenizer, source="")]
    folder = dumps.dump_evaluation(tmp_path, 4, rollouts, {"eval/all/avg_score": 0.5}, tiny_tokenizer)
    assert folder == tmp_path / "dumped_evals" / "global_step_4_evals"
    assert {path.name for path in folder.iterdir()} == {"owner_set.jsonl", "unknown.jsonl", "aggregated_results.jsonl"}
    assert lines(folder / "aggregated_results.jsonl") == [{"eval/all/avg_score": 0.5}]
    (row,) = lines(folder / "owner_set.jsonl")
    assert row == {
        "input_prompt": "1+1=", "output_response": "3", "score": 0.5, "stop_reason": "stop", "env_class": "gsm8k",
        "env_extras": {"level": 2}, "data_source": "owner/set", "uid": "7", "repetition": 1,
        "messages": [{"role": "assistant", "content": "3"}],
    }  # fmt: skip


def test_a_column_that_json_does_not_know_is_written_as_text(tmp_path, tiny_tokenizer):
    rollouts = [trajectory(tiny_tokenizer, day=datetime.date(2026, 8, 1))]
    path = dumps.dump_trajectories(tmp_path, 3, rollouts, tiny_tokenizer)
    assert path == tmp_path / "dumped_data" / "global_step_3_trajectories.jsonl"
    assert lines(path)[0]["env_extras"] == {"day": "2026-08-01"}


def test_rows_of_a_tracker_have_the_public_columns(tiny_tokenizer):
    rows = dumps.table_rows(2, [trajectory(tiny_tokenizer)], tiny_tokenizer)
    assert rows == [{"step": 2, "idx": 0, "reward": 0.5, "num_turns": 1, "trajectory": "1+1=3"}]
