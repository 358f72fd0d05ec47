"""What the loop asks of a source of rollouts, and which source each `trainer.mode` means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from skyrl.train.generator.trajectory import PromptTask, Trajectory
from skyrl.train.waits import Patience

WAIT_KEY = "trainer.rollout_wait_timeout_s"


class PromptsUsedUp(Exception):
    """All epochs are through before the planned number of steps: the run ends after the last step."""


class Collects(Protocol):
    """What a source needs of the trainer: a subclass of it decides how prompts become a batch."""

    cfg: Any
    train_loader: Any
    rollouts: Any
    progress: Any
    total_steps: int

    @property
    def prompts_used_up(self) -> bool: ...
    async def collect_batch(self, step: int) -> list[Trajectory]: ...
    async def collect(self, tasks: Sequence[PromptTask], step: int) -> list[Trajectory]: ...


class RolloutSource:
    """One run's rollouts, a batch a step. This one makes a batch when it is asked for it: rollouts and updates take
    turns (`trainer.mode=plain`)."""

    def __init__(self, trainer: Collects) -> None:
        self.trainer = trainer
        self.patience = Patience(trainer.cfg.trainer.rollout_wait_timeout_s, key=WAIT_KEY)

    def begin(self, step: int) -> None:
        """The servers have the weights that `step`, the first to be trained, starts from."""

    async def take(self, step: int) -> list[Trajectory]:
        """What `step` trains on. Raises PromptsUsedUp, what a rollout raised, or RunFailed where none ends in time."""
        return await self.patience.wait(self.trainer.collect_batch(step), name=f"the rollouts of step {step}")

    def moved(self, done: int, total: int) -> None:
        """`done` of `total` samples of one call have ended."""
        self.patience.moved()
        self.trainer.progress.waiting_for(f"rollouts {done}/{total}")

    async def before_publish(self) -> None:
        """Returns once new weights may be published."""

    def published(self, step: int) -> None:
        """The servers have the weights of `step`."""

    @property
    def used_up(self) -> bool:
        """Whether no further batch will come."""
        return self.trainer.prompts_used_up

    def trained_through(self) -> Mapping[str, int]:
        """epoch and position of the last batch that is trained on or being trained on, with all before it."""
        return {"epoch": self.trainer.train_loader.epoch, "position": self.trainer.train_loader.position}

    def metrics(self) -> dict[str, float]:
        """Of the batch that was taken last."""
        return {}

    # State

    def loader_state(self) -> dict[str, Any]:
        """How far the prompts are used up, as the loader says it."""
        return self.trainer.train_loader.state_dict()

    def state(self) -> dict[str, Any]:
        """What must be known besides to go on: JSON."""
        return {}

    def save(self, folder: Path) -> None:
        """Rollouts that are made and not yet trained on, as files of a checkpoint."""

    def load(self, state: dict[str, Any], folder: Path) -> None:
        """Goes on where `state` and `save` were made; the loader stands where `loader_state` said."""

    async def close(self) -> None:
        """Ends what still runs."""
