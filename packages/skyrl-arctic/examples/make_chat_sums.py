"""Prompts for a chat model on which a small one is sometimes right: one-digit sums after three worked examples.

Rows are scored by the gsm8k environment: the answer has to read `#### 12`.

    uv run --package skyrl-arctic python packages/skyrl-arctic/examples/make_chat_sums.py FOLDER
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

SEED = 7
SIZES = {"train": 56, "eval": 16}
WORKED = ((3, 4), (8, 5), (6, 2))


def messages(first: int, second: int) -> list[dict[str, str]]:
    """The worked examples as earlier turns, then the question."""
    turns = []
    for a, b in WORKED:
        turns.append({"role": "user", "content": f"What is {a} + {b}?"})
        turns.append({"role": "assistant", "content": f"#### {a + b}"})
    return [*turns, {"role": "user", "content": f"What is {first} + {second}?"}]


def main(folder: Path) -> None:
    """Writes `train.jsonl` and `eval.jsonl`, which share no sum."""
    sums = [(a, b) for a in range(1, 10) for b in range(1, 10) if (a, b) not in WORKED]
    random.Random(SEED).shuffle(sums)
    folder.mkdir(parents=True, exist_ok=True)
    start = 0
    for split, size in SIZES.items():
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for a, b in sums[start : start + size]:
                row = {"prompt": messages(a, b), "reward_spec": {"method": "rule", "ground_truth": str(a + b)}}
                file.write(json.dumps({"data_source": "chat_sums", "env_class": "gsm8k", **row}) + "\n")
        start += size


if __name__ == "__main__":
    main(Path(sys.argv[1]))
