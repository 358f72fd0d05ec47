"""A user's entrypoint with a planted fault: the weights of the last step are never published."""

from typing import Any

from skyrl.train.entrypoints.main_base import BasePPOExp, main
from skyrl.train.trainer import RayPPOTrainer


class SkipsTheLastPublish(RayPPOTrainer):
    async def publish(self, *, step: int) -> None:
        if step < self.total_steps:
            await super().publish(step=step)


class Experiment(BasePPOExp):
    def get_trainer(self, **parts: Any) -> SkipsTheLastPublish:
        return SkipsTheLastPublish(self.cfg, **parts)


if __name__ == "__main__":
    main(exp_cls=Experiment)
