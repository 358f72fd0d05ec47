"""The error that every running request ends with when the engine's process is gone."""

from __future__ import annotations

import grpc
from skyrl_rollout.errors import RolloutError


class EngineDead(RolloutError):
    """UNAVAILABLE: the tokens received so far are valid; send prompt and tokens to another replica."""

    code, reason = grpc.StatusCode.UNAVAILABLE, "ENGINE_DEAD"

    def __init__(self) -> None:
        super().__init__("the inference engine died: use another replica, this server is going down")
