"""How to train on data of your own with an environment of your own, from one file, without GPU or download.

    uv run --package skyrl-core python packages/skyrl-core/examples/own_data.py
    uv run --package skyrl-core python packages/skyrl-core/examples/own_data.py trainer.max_training_steps=20

The task: answer a sum with three even digits, right or wrong. The model is the tiny one of the default run, which was
made to add. What follows the script's name overrides what it sets, as for any recipe.
"""

import json
import sys
import tempfile
from pathlib import Path

import skyrl.train.quickstart
from skyrl.train import environments
from skyrl.train.entrypoints.main_base import main
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

TINY_MODEL = Path(skyrl.train.quickstart.__file__).parent / "tiny_model"


class EvenDigits(BaseTextEnv):
    """Rewards the share of even digits in an answer of three characters; `extras` are the row's other columns."""

    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self.num_digits = extras["num_digits"]

    def step(self, action: str) -> BaseTextEnvStepOutput:
        even = sum(character in "02468" for character in action)
        reward = even / self.num_digits if len(action) == self.num_digits else 0.0
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})


def write_rows(path: Path) -> Path:
    """One row per sum: a prompt, and what the environment needs to score the answer."""
    rows = [
        {"data_source": "even", "prompt": [{"role": "user", "content": f"{first}+3="}], "num_digits": 3}
        for first in range(10, 42)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


if __name__ == "__main__":
    environments.register("even_digits", EvenDigits)
    rows = write_rows(Path(tempfile.mkdtemp()) / "sums.jsonl")
    main(
        [
            f"data.train_data=['{rows}']",
            f"data.val_data=['{rows}']",
            "environment.env_class=even_digits",
            f"trainer.policy.model.path={TINY_MODEL}",
            "trainer.policy.optimizer_config.lr=3e-4",
            "trainer.algorithm.use_kl_loss=false",
            "trainer.train_batch_size=16",
            "trainer.policy_mini_batch_size=16",
            "trainer.micro_train_batch_size_per_gpu=128",
            "trainer.micro_forward_batch_size_per_gpu=128",
            "trainer.max_prompt_length=16",
            "trainer.epochs=15",
            "trainer.eval_interval=-1",
            "trainer.eval_before_train=false",
            "trainer.logger=console",
            "generator.n_samples_per_prompt=8",
            "generator.sampling_params.max_generate_length=5",
            "generator.inference_engine.enforce_eager=true",
            *sys.argv[1:],
        ]
    )
