"""Under which name servers hold the adapter of a run that trains one, and which servers can hold it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyrl_rollout.errors import MissingCapability
from skyrl_rollout.server_info import ServerInfo

RANK = "trainer.policy.model.lora.rank"
ADAPTER_POLICY = "lora"


def policy_of(cfg: Any) -> str:
    """The policy that requests name: the adapter where one is trained, else "", the base weights."""
    return ADAPTER_POLICY if cfg.trainer.policy.model.lora.rank else ""


def require_adapters(servers: Sequence[ServerInfo], rank: int) -> None:
    """Raises MissingCapability naming the servers that take no low-rank adapters, before anything is sent."""
    without = [info.url for info in servers if not info.capabilities.lora]
    if without:
        raise MissingCapability(
            f"{RANK}={rank} trains an adapter, and {', '.join(without)} does not take any: start the server with room "
            f"for adapters (arguments such as --max-loras 1 --max-lora-rank {rank}; a server that this run starts by "
            f"generator.inference_engine.backend gets its own), or set {RANK}=0",
            details={"capability": "lora"},
        )
