"""A user's entrypoint with a planted fault: the weights of the last step are never published."""

import sys

from skyrl.train.entrypoints.main_base import BasePPOExp, run_experiment
from skyrl.train.trainer import RayPPOTrainer


class SkipsTheLastPublish(RayPPOTrainer):
    async def publish(self, *, step: int) -> None:
        if step < self.total_steps:
            await super().publish(step=step)


class Experiment(BasePPOExp):
    trainer_cls = SkipsTheLastPublish


if __name__ == "__main__":
    sys.exit(run_experiment(Experiment, sys.argv[1:]))
