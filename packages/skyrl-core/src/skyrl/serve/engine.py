"""The server kit's Engine over a batch of rows: what the event loop sees of the thread that makes the steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial

from skyrl_rollout.errors import RolloutError, WrongState
from skyrl_rollout.server.engine import (
    Adapter,
    EngineCapabilities,
    EngineLoad,
    EngineRequest,
    EngineScoreRequest,
    PlainEngine,
    PromptRead,
    SampleEnded,
    TokensMade,
    TokensScored,
)
from skyrl_rollout.server.signals import Signal
from skyrl_rollout.tokens import FinishReason, LogprobMode
from skyrl_rollout.weights.manifest import TensorLayout

from skyrl.serve.batch import Batch, Limits
from skyrl.serve.model import ServedModel
from skyrl.serve.rows import Item, Sample, Work
from skyrl.serve.worker import Worker

EMIT_EVERY_S = 0.02  # how long made tokens may wait before they are handed over
WAIT_POLL_S = 0.01
MAX_TOP_LOGPROBS = 128  # unless asked for more


class TransformersEngine(PlainEngine):
    """Implements `skyrl_rollout.server.engine.Engine`. To be made inside the event loop that serves it."""

    def __init__(self, model: ServedModel, limits: Limits, *, max_top_logprobs: int = MAX_TOP_LOGPROBS) -> None:
        self.identity = model.identity
        self.capabilities = EngineCapabilities(
            logprob_modes=(LogprobMode.RAW, LogprobMode.TEMPERATURE, LogprobMode.SAMPLING),
            pause_modes=("abort", "wait", "keep"),
            kv_policies=("recompute", "retain"),
            deterministic_seed=model.device.type == "cpu",  # on a GPU logits depend a little on the batch
            stop_strings=model.tokenizer is not None,
            max_top_logprobs=min(max_top_logprobs, model.identity.vocab_size),
            prompt_logprobs=True,
            cached_prompt_tokens=True,
            score=True,
            priority=True,
            reset_cache=True,
            lora=True,
        )
        self._tokenizer = model.tokenizer
        self._loop = asyncio.get_running_loop()
        self._open: dict[str, _Open] = {}
        self._made: list[tuple[_Open, Item]] = []
        self._flushed_at = 0.0
        self._batch = Batch(model, limits, lambda: self._worker.is_asked)
        self._worker = Worker(can_step=lambda: self._batch.can_step, step=self._step, failed=self._fail)

    def check(self, request: EngineRequest) -> None:
        """Prompt logprobs are of what the model says, not of a truncated distribution that nobody drew from."""
        plain = request.sampling.is_full_distribution
        if request.prompt_last_n and request.mode is LogprobMode.SAMPLING and not plain:
            raise ValueError("a prompt was not drawn with penalties, top_k, top_p or min_p: ask for RAW or TEMPERATURE")

    async def generate(self, request: EngineRequest) -> AsyncGenerator[PromptRead | TokensMade | SampleEnded]:
        opened = _Open()
        work = Work.generating(request, self._tokenizer, partial(self._hand_over, opened))
        left = request.num_samples
        async with aclosing(self._items(work, opened)) as items:
            while left:
                item = await anext(items)
                assert not isinstance(item, TokensScored)
                left -= isinstance(item, SampleEnded)
                yield item

    def check_score(self, request: EngineScoreRequest) -> None:
        """Every mode and temperature is exact; there are no sampling parameters, so SAMPLING is TEMPERATURE."""

    async def score(self, request: EngineScoreRequest) -> AsyncGenerator[TokensScored]:
        opened = _Open()
        work = Work.scoring(request, partial(self._hand_over, opened))
        left = len(request.token_ids) - request.score_from
        async with aclosing(self._items(work, opened)) as items:
            while left:
                item = await anext(items)
                assert isinstance(item, TokensScored)
                left -= len(item.logprobs)
                yield item

    async def abort(self, request_id: str) -> None:
        opened = self._open.get(request_id)
        if opened is not None and opened.work is not None:
            await self._between_steps(partial(self._batch.end, opened.work, FinishReason.ABORTED))

    async def pause(self, mode: str, *, clear_cache: bool) -> None:
        while mode == "wait" and await self._worker.call(lambda: bool(self._batch.running or self._batch.waiting)):
            await asyncio.sleep(WAIT_POLL_S)
        await self._between_steps(partial(self._batch.pause, mode, clear_cache=clear_cache))

    async def resume(self) -> None:
        await self._worker.call(self._batch.resume)

    def tokens_made(self) -> Mapping[str, list[int]]:
        return {
            request_id: [len(row.output) for row in opened.work.rows if isinstance(row, Sample)]
            for request_id, opened in self._open.items()
            if opened.work is not None
        }

    async def load_weights(self, tensors: Iterator[tuple[TensorLayout, memoryview]]) -> None:
        await self._worker.call(partial(self._batch.load_weights, tensors))

    def load(self) -> EngineLoad:
        return self._batch.load()

    async def reset_cache(self, *, preempt_running: bool) -> int:
        return await self._worker.call(partial(self._reset_cache, preempt_running))

    def check_adapter(self, adapter: Adapter, tensors: Sequence[TensorLayout]) -> None:
        self._batch.adapters.check(adapter, tensors)

    async def load_adapter(self, adapter: Adapter, tensors: Iterator[tuple[TensorLayout, memoryview]]) -> None:
        await self._worker.call(partial(self._batch.load_adapter, adapter, tensors))

    async def drop_adapter(self, policy_id: str) -> None:
        await self._worker.call(partial(self._batch.adapters.drop, policy_id))

    async def close(self) -> None:
        await self._worker.close()

    async def _items(self, work: Work, opened: _Open) -> AsyncGenerator[Item]:
        """Everything that the work hands over, without end: the reader knows what is the last. Closing it, or an error,
        ends the work."""
        opened.work = work
        self._open[work.request_id] = opened
        self._worker.post(partial(self._batch.add, work))
        try:
            while True:
                if not opened.items:
                    await opened.arrived.wait()
                if opened.failure is not None:
                    raise opened.failure
                items, opened.items = opened.items, []
                for item in items:
                    yield item
        finally:
            if self._open.get(work.request_id) is opened:
                del self._open[work.request_id]
            self._worker.post(partial(self._batch.end, work, FinishReason.ABORTED))

    def _reset_cache(self, preempt_running: bool) -> int:
        batch = self._batch
        if (batch.running or batch.waiting) and not preempt_running:
            raise WrongState("requests are running: ask for preempt_running, or wait until they have ended")
        return batch.reset_cache(preempt_running=preempt_running)

    async def _between_steps(self, change: partial[None]) -> None:
        """What the change handed over has arrived when this returns."""

        def work() -> None:
            change()
            self._emit()

        await self._worker.call(work)

    def _step(self) -> None:
        """On the worker's thread."""
        self._batch.step()
        if time.monotonic() - self._flushed_at > EMIT_EVERY_S:
            self._batch.flush()
            self._flushed_at = time.monotonic()
        self._emit()

    def _hand_over(self, opened: _Open, item: Item) -> None:
        """On the worker's thread."""
        self._made.append((opened, item))

    def _emit(self) -> None:
        """On the worker's thread: everything handed over goes to the event loop in one call."""
        if self._made:
            made, self._made = self._made, []
            self._loop.call_soon_threadsafe(_deliver, made)

    def _fail(self, error: Exception) -> None:
        """On the worker's thread: whoever had work in the step that failed is told."""
        self._made.clear()
        failed = {id(work) for work in self._batch.fail()}
        opened = [o for o in list(self._open.values()) if id(o.work) in failed]
        reason = RolloutError(f"a step of the engine failed: {type(error).__name__}: {error}")
        self._loop.call_soon_threadsafe(_deliver_failure, opened, reason)


class _Open:
    """A request whose iterator is open, on the event loop's side."""

    def __init__(self) -> None:
        self.work: Work | None = None
        self.items: list[Item] = []
        self.arrived = Signal()
        self.failure: Exception | None = None


def _deliver(made: list[tuple[_Open, Item]]) -> None:
    for opened, item in made:
        opened.items.append(item)
        opened.arrived.fire()


def _deliver_failure(opened: list[_Open], reason: Exception) -> None:
    for o in opened:
        o.failure = reason
        o.arrived.fire()
