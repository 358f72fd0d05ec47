"""The Arctic trainer's generator: the core's, token in and token out, whichever server answers."""

from __future__ import annotations

from skyrl.train.generator.env_generator import EnvGenerator


class ArcticGenerator(EnvGenerator):
    """The core's generator; multi-turn episodes, loss masks and rollout logprobs are the same on every backend."""
