"""The arithmetic task as a data set on disk: one parquet file to train on and one, disjoint from it, to evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from skyrl.train.data.arithmetic import PROBLEMS, Split

ENV_CLASS = "arithmetic"


class ArithmeticFiles(NamedTuple):
    """Where the two splits were written."""

    train: Path
    eval: Path


def rows(split: Split) -> list[dict[str, Any]]:
    """The split's problems in order, in the row format of `data.train_data`; the same at every call."""
    return [
        {
            "data_source": ENV_CLASS,
            "prompt": [{"role": "user", "content": problem.prompt}],
            "env_class": ENV_CLASS,
            "reward_spec": {"method": "rule", "ground_truth": problem.answer},
            "extra_info": {"split": split, "index": index},
        }
        for index, problem in enumerate(PROBLEMS[split])
    ]


def write(folder: Path) -> ArithmeticFiles:
    """Writes `train.parquet` (900 rows) and `eval.parquet` (100 rows) into `folder`, which is made if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    files = ArithmeticFiles(train=folder / "train.parquet", eval=folder / "eval.parquet")
    pq.write_table(pa.Table.from_pylist(rows("train")), files.train)
    pq.write_table(pa.Table.from_pylist(rows("eval")), files.eval)
    return files
