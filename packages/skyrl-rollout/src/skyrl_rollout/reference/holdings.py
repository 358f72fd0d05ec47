"""What the reference engine holds beside its requests, and how it gives that back: adapters, cached blocks, tables."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence

import numpy as np

from skyrl_rollout.errors import WrongState
from skyrl_rollout.reference.logits import LogitTable, canary_bias
from skyrl_rollout.reference.prefix_cache import PrefixCache
from skyrl_rollout.reference.rows import Row
from skyrl_rollout.server.engine import Adapter, PlainEngine
from skyrl_rollout.weights.manifest import TensorLayout

UP = ".lora_B.weight"
BLOCK_NBYTES = sys.getsizeof(bytes(16))  # of a cached block's digest


class Holdings(PlainEngine):
    """The tables that logits come from stand for what an accelerator holds: asleep, they are really gone."""

    prefix_cache: PrefixCache
    _table: LogitTable
    _rows: list[Row]
    _adapter_biases: dict[str, np.ndarray]  # policy_id -> float64 [V], on top of the base's logits
    _reads_weights: bool  # canary mode

    async def reset_cache(self, *, preempt_running: bool) -> int:
        """There is no KV to compute again: a running sample only counts that it was preempted."""
        if self._rows and not preempt_running:
            raise WrongState(f"{len(self._rows)} samples hold cached blocks")
        for row in self._rows:
            row.num_preemptions += 1
        return self.prefix_cache.drop()

    async def sleep(self, level: str) -> int:
        """The seed makes the tables again, so only the bias is weights: "offload" keeps it."""
        freed = self._table.drop() + self.prefix_cache.drop() * BLOCK_NBYTES
        if level == "discard":
            freed += self._table.bias_V.nbytes
            self._table.bias_V = np.empty(0)
        return freed

    async def wake_up(self, *, weights: bool, kv_cache: bool) -> None:
        if weights:
            await asyncio.to_thread(self._table.build)
            if not len(self._table.bias_V):
                self._table.bias_V = np.zeros(self._table.vocab_size)

    def check_adapter(self, adapter: Adapter, tensors: Sequence[TensorLayout]) -> None:
        """Whatever fits the model is taken."""

    async def load_adapter(self, adapter: Adapter, tensors: Iterator[tuple[TensorLayout, memoryview]]) -> None:
        """In canary mode the first second factor biases the logits as the canary tensor does."""
        vocab_size = self._table.vocab_size
        bias_V = np.zeros(vocab_size)
        if self._reads_weights:
            layout, data = next((t, data) for t, data in tensors if t.name.endswith(UP))
            bias_V = await asyncio.to_thread(canary_bias, layout, data, vocab_size)
        self._adapter_biases[adapter.policy_id] = bias_V

    async def drop_adapter(self, policy_id: str) -> None:
        self._adapter_biases.pop(policy_id, None)
