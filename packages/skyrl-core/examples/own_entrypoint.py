"""How to run a trainer, a policy loss and an environment of your own, on whichever backend the arguments name.

    uv run --package skyrl-core python packages/skyrl-core/examples/own_entrypoint.py
    uv run --package skyrl-core python packages/skyrl-core/examples/own_entrypoint.py trainer.backend=NAME

The task: answer a sum with a text that begins with the right digit. What follows the script's name overrides what it
sets, as for any recipe.
"""

import sys
from pathlib import Path

import skyrl.train.quickstart
from skyrl.train import environments
from skyrl.train.algorithms.policy_losses import TokenLoss, policy_ratio, register_policy_loss
from skyrl.train.config import AlgorithmConfig, key, make_config
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.trainer import RayPPOTrainer
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

EMBEDDED = Path(skyrl.train.quickstart.__file__).parent / "embedded.yaml"
DEFAULTS = [
    f"@{EMBEDDED}",
    "generator.inference_engine.backend=transformers",
    "environment.env_class=first_digit",
    "trainer.algorithm.policy_loss_type=clipped_above",
    "trainer.max_training_steps=3",
    "trainer.run_name=own-entrypoint",
]


class FirstDigit(BaseTextEnv):
    """Rewards an answer whose first digit is that of the sum, written with three digits."""

    def __init__(self, env_config=None, extras=None):
        super().__init__()

    def init(self, prompt):
        self.expected = f"{sum(map(int, prompt[-1]['content'].rstrip('=').split('+'))):03d}"
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reward = float(action[:1] == self.expected[0])
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})


class OwnAlgorithm(AlgorithmConfig):
    """`trainer.algorithm.*` with one more key."""

    ratio_limit: float = key(1.5, "The ratio of clipped_above is at most this.", gt=0)


def clipped_above(inputs, algorithm):
    """-A min(r, ratio_limit): the ratio is clipped on one side only."""
    ratio_T = policy_ratio(inputs).clamp(max=algorithm.ratio_limit)
    return TokenLoss(-inputs.advantages_T * ratio_T, {"share_above": (ratio_T == algorithm.ratio_limit).float()})


class OwnTrainer(RayPPOTrainer):
    """The loop with one step changed: advantages lose their smallest parts."""

    def advantages(self, batch):
        batch = super().advantages(batch)
        large_T = batch.advantages_T.abs() > 0.1
        return batch.with_tensors(advantages_T=batch.advantages_T * large_T)


class OwnExp(BasePPOExp):
    """The run, with that trainer in place of the backend's."""

    trainer_cls = OwnTrainer


def main(argv):
    environments.register("first_digit", FirstDigit)
    register_policy_loss("clipped_above", clipped_above)
    cfg = make_config(algorithm_cls=OwnAlgorithm).from_cli_overrides([*DEFAULTS, *argv])
    OwnExp(cfg).run()


if __name__ == "__main__":
    main(sys.argv[1:])
