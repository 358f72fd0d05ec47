"""When the reference takes over the policy's weights (`trainer.update_ref_every_epoch`), and how it comes back."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = "ref"  # in a checkpoint
_ON_THE_WAY = ".reference"


class FollowingReference:
    """The reference of a run, from the end of each epoch on as the policy was then.

    `epochs` counts the epochs that it has followed; 0: it is the model that it was loaded from, and no checkpoint needs
    to hold it. `reference` is None where the run has none. The methods block.
    """

    def __init__(self, policy: Any, reference: Any | None, *, follows: bool) -> None:
        self._policy, self._reference = policy, reference
        self._follows = follows and reference is not None
        self.epochs = 0

    def is_due(self, loader_state: Mapping[str, Any], batches_per_epoch: int) -> bool:
        """Whether an epoch has ended since the reference followed last."""
        return self._follows and epochs_through(loader_state, batches_per_epoch) > self.epochs

    def follow(self, loader_state: Mapping[str, Any], batches_per_epoch: int, *, through: Path) -> None:
        """The policy's weights become the reference's, over a folder that all workers see and that is gone after it."""
        folder = through / _ON_THE_WAY
        shutil.rmtree(folder, ignore_errors=True)
        try:
            self._policy.save_weights(folder)
            assert self._reference is not None
            self._reference.load_weights(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self.epochs = epochs_through(loader_state, batches_per_epoch)

    def save(self, checkpoint: Path) -> None:
        """The reference's weights, where they are not those of its model's folder."""
        if self.epochs and self._reference is not None:
            self._reference.save_weights(checkpoint / FOLDER)

    def load(self, checkpoint: Path, epochs: int) -> None:
        """Restores what `save` wrote at that count. ValueError where it is missing or damaged."""
        if epochs and self._reference is not None:
            self._reference.load_weights(checkpoint / FOLDER)
        self.epochs = epochs


def epochs_through(loader_state: Mapping[str, Any], batches_per_epoch: int) -> int:
    """How many epochs are trained on to their end, from the state that a checkpoint keeps of the loader."""
    return int(loader_state["epoch"]) + int(loader_state["position"] == batches_per_epoch)
