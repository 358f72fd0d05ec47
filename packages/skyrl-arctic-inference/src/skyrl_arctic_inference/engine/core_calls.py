"""What the front asks of vLLM's scheduler beyond its own calls: methods added to the engine core before it starts.

A forked core has them from the front; one that vLLM spawns gets them when vLLM loads its plugins (entry point
`vllm.general_plugins`).
"""

from __future__ import annotations

from typing import Any

from vllm.v1.engine.core import EngineCore

HELD = -1  # blocks are held by requests: nothing was dropped


def add_core_calls() -> None:
    """Idempotent; imports vLLM."""
    EngineCore.drop_cached_blocks = drop_cached_blocks


def drop_cached_blocks(core: Any, preempt_running: bool) -> int:
    """Empties the prefix cache and returns how many blocks that freed, those of preempted requests included; HELD
    without a change where running requests hold blocks and may not be preempted."""
    pool = core.scheduler.kv_cache_manager.block_pool
    in_use = sum(block.ref_cnt > 0 for block in pool.blocks if not block.is_null)
    if in_use and not preempt_running:
        return HELD
    freed = sum(block.ref_cnt > 0 or block.block_hash is not None for block in pool.blocks if not block.is_null)
    return freed if core.scheduler.reset_prefix_cache(preempt_running) else HELD
