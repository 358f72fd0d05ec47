"""In which order prompts are trained on: a seeded shuffle per epoch, full batches only, resumable at any batch."""

from __future__ import annotations

from typing import Any

import numpy as np

from skyrl.train.data.prompts import PromptDataset
from skyrl.train.generator.trajectory import PromptTask
from skyrl.train.seeds import derive


class PromptLoader:
    """Batches of `batch_size` prompts, epoch after epoch; what does not fill a batch at the end of one is dropped.

    `epoch` (from 0) is that of the last batch handed out, `position` the number handed out of that epoch.

    It runs in this process: rows are in memory already. Raises ValueError where the data set has fewer prompts than
    one batch needs.
    """

    def __init__(self, dataset: PromptDataset, batch_size: int, *, seed: int) -> None:
        if len(dataset) < batch_size:
            dropped = f" ({dataset.num_dropped} more are too long)" if dataset.num_dropped else ""
            raise ValueError(
                f"{dataset.key} has {len(dataset)} usable prompts{dropped}, trainer.train_batch_size={batch_size} "
                "needs at least as many: lower the batch size or add data"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = 0
        self.position = 0
        self._cached_order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    def __len__(self) -> int:
        """Batches in one epoch."""
        return len(self.dataset) // self.batch_size

    def next_batch(self) -> list[PromptTask]:
        """The next `batch_size` prompts; a new epoch, in a new order, begins where the last one is used up."""
        if self.position == len(self):
            self.epoch, self.position = self.epoch + 1, 0
        start = self.position * self.batch_size
        self.position += 1
        return [self.dataset[int(i)] for i in self._order(self.epoch)[start : start + self.batch_size]]

    def _order(self, epoch: int) -> np.ndarray:
        """Row positions int64 [num_prompts] of one epoch."""
        if self._cached_order[0] != epoch:
            order = np.arange(len(self.dataset))
            np.random.Generator(np.random.PCG64(derive(self.seed, "epoch", epoch))).shuffle(order)
            self._cached_order = (epoch, order)
        return self._cached_order[1]

    def state_dict(self) -> dict[str, Any]:
        """How far the data is used up, and what must be equal for that to mean the same prompts."""
        return {"epoch": self.epoch, "position": self.position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken. ValueError lists what differs from the run that took it."""
        differences = [
            f"{name}: {state.get(name)!r} in the checkpoint, {value!r} here"
            for name, value in self._identity().items()
            if state.get(name) != value
        ]
        if differences:
            raise ValueError(
                f"{self.dataset.key}: the checkpoint's position does not fit this data ({'; '.join(differences)}): "
                "resume with the same data, seed and batch size, or start with trainer.resume_mode=none"
            )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "batch_size": self.batch_size,
            "num_prompts": len(self.dataset),
            "digest": self.dataset.digest,
        }
