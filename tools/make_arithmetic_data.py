"""What the data files of the default run hold: every sum of a split, one row per line, in the public prompt format.

The rows name no environment: `environment.env_class` of the run decides what scores them.

    uv run tools/make_arithmetic_data.py
"""

import json
from pathlib import Path

from skyrl.train.data.arithmetic import PROBLEMS, Problem, Split

FOLDER = Path(__file__).resolve().parents[1] / "packages/skyrl-core/src/skyrl/train/quickstart"


def row(split: Split, index: int, problem: Problem) -> dict[str, object]:
    """One line of a file."""
    return {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": problem.prompt}],
        "reward_spec": {"method": "rule", "ground_truth": problem.answer},
        "extra_info": {"split": split, "index": index},
    }


def files() -> dict[Path, str]:
    """Path -> content of the file of each split."""
    return {
        FOLDER / f"arithmetic_{split}.jsonl": "".join(
            json.dumps(row(split, index, problem)) + "\n" for index, problem in enumerate(problems)
        )
        for split, problems in PROBLEMS.items()
    }


def main() -> None:
    """Write them."""
    for path, content in files().items():
        path.write_text(content)
        print(f"wrote {content.count(chr(10))} rows to {path}")


if __name__ == "__main__":
    main()
