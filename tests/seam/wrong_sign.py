"""A user's entrypoint with a planted fault: every advantage has the wrong sign."""

from typing import Any

from skyrl.train.entrypoints.main_base import BasePPOExp, main
from skyrl.train.policy.batch import TrajectoryBatch


class Experiment(BasePPOExp):
    def get_trainer(self, **parts: Any) -> Any:
        trainer = super().get_trainer(**parts)
        estimate = trainer.advantages

        def wrong(batch: TrajectoryBatch) -> TrajectoryBatch:
            batch = estimate(batch)
            assert batch.advantages_T is not None
            return batch.with_tensors(advantages_T=-batch.advantages_T)

        trainer.advantages = wrong
        return trainer


if __name__ == "__main__":
    main(exp_cls=Experiment)
