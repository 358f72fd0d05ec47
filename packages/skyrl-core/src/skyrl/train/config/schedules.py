"""Which learning-rate schedules there are (`optimizer_config.scheduler`, transformers' names), and which cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from skyrl.train.config.problems import listed

# Each follows from the number of updates, of warm-up and of the whole run alone, and so after a resume too.
SCHEDULES = (
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt",
)  # fmt: skip
NO_KEY = "it needs settings of its own, for which the public tree has no key"
BY_METRIC = "it follows a validation loss, which a run of reinforcement learning does not have"
NOT_HERE = {
    "cosine_with_min_lr": NO_KEY,
    "cosine_warmup_with_min_lr": NO_KEY,
    "warmup_stable_decay": NO_KEY,
    "reduce_lr_on_plateau": BY_METRIC,
    "greedy": BY_METRIC,
}
POLYNOMIAL_END = 1e-7  # transformers' last learning rate of that schedule


def rules(cfg: Any) -> Iterator[str]:
    """A schedule that is known, of each model that is trained."""
    for role in ("policy", "critic"):
        optimizer = getattr(cfg.trainer, role).optimizer_config
        key, name = f"trainer.{role}.optimizer_config.scheduler", optimizer.scheduler
        if name in NOT_HERE:
            yield f"{key}={name}: {NOT_HERE[name]}; {listed(name, SCHEDULES)}"
        elif name not in SCHEDULES:
            yield f"{key}={name}: {listed(name, SCHEDULES)}"
        elif name == "polynomial" and optimizer.lr <= POLYNOMIAL_END:
            yield (
                f"{key}=polynomial falls to {POLYNOMIAL_END:g}: trainer.{role}.optimizer_config.lr="
                f"{optimizer.lr:g} must be above that, or take linear, which falls to 0"
            )
