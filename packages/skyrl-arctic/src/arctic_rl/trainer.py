"""The Arctic trainer's loop: the core's, step for step. What differs is the policy backend behind it."""

from __future__ import annotations

from skyrl.train.trainer import RayPPOTrainer


class ArcticPPOTrainer(RayPPOTrainer):
    """The core's loop with the policy on DeepSpeed; see `RayPPOTrainer` for the parts that a subclass may override."""
