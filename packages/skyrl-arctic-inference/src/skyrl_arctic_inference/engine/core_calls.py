"""What vLLM's engine core does here beyond its own: calls of the front to the scheduler, and blocks handed out clean.

A forked core has them from the front; one that vLLM spawns gets them when vLLM loads its plugins (entry point
`vllm.general_plugins`).
"""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import KVCacheConfig

HELD = -1  # blocks are held by requests: nothing was dropped


def add_core_calls() -> None:
    """Idempotent; imports vLLM."""
    EngineCore.drop_cached_blocks = drop_cached_blocks
    if current_platform.is_cpu():
        # Attention on a CPU reads all of a request's last block and multiplies what lies beyond its end by zero, which
        # leaves NaN what it is: after one bad update, or one bad adapter, other requests would answer NaN too.
        KVCacheConfig.needs_kv_cache_zeroing = True


def drop_cached_blocks(core: Any, preempt_running: bool) -> int:
    """Empties the prefix cache and returns how many blocks that freed, those of preempted requests included; HELD
    without a change where running requests hold blocks and may not be preempted."""
    pool = core.scheduler.kv_cache_manager.block_pool
    in_use = sum(block.ref_cnt > 0 for block in pool.blocks if not block.is_null)
    if in_use and not preempt_running:
        return HELD
    freed = sum(block.ref_cnt > 0 or block.block_hash is not None for block in pool.blocks if not block.is_null)
    return freed if core.scheduler.reset_prefix_cache(preempt_running) else HELD
