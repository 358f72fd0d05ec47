"""How to score answers with a function of your own: no environment class, no registration, one file.

    uv run --package skyrl-core python packages/skyrl-core/examples/own_reward.py

The function is `score(prompt, response, extras)`: the prompt's messages, the answer as text, the row's other columns.
It returns a number, or a mapping with one under "reward" whose other numbers become metrics (`environment/<name>`). Any
recipe takes it as `environment.reward=module:function`, with the module in the folder of the run or on PYTHONPATH; an
answer that it cannot score ends the run by name, or with `environment.on_error=drop` costs that one sample.
"""

import sys
from pathlib import Path

import skyrl.train.quickstart
from skyrl.train.entrypoints.main_base import main

EMBEDDED = Path(skyrl.train.quickstart.__file__).parent / "embedded.yaml"


def score(prompt, response, extras):
    """Half a point for three digits, the other half for the right ones."""
    is_number = len(response) == 3 and response.isdigit()
    is_right = response == extras["reward_spec"]["ground_truth"]
    return {"reward": 0.5 * is_number + 0.5 * is_right, "is_number": float(is_number)}


if __name__ == "__main__":
    main(
        [
            f"@{EMBEDDED}",
            "environment.reward=own_reward:score",
            "trainer.max_training_steps=20",
            "trainer.run_name=own-reward",
            *sys.argv[1:],
        ]
    )
