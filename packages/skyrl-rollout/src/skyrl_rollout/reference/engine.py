"""An engine without a model: deterministic tokens for many requests at once, paused exactly between two tokens."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping
from pathlib import Path

import numpy as np

from skyrl_rollout.reference.logits import CONTEXT, NO_TOKEN, LogitTable, canary_bias, canary_tensor
from skyrl_rollout.reference.model import ModelFolder, built_in
from skyrl_rollout.reference.sampling import draw_plain, draw_shaped, uniforms
from skyrl_rollout.server.engine import (
    EngineCapabilities,
    EngineLoad,
    EngineRequest,
    ModelIdentity,
    PlainEngine,
    PromptRead,
    SampleEnded,
    TokensMade,
)
from skyrl_rollout.server.signals import Signal
from skyrl_rollout.tokens import FinishReason, LogprobMode
from skyrl_rollout.weights.manifest import TensorLayout

BLOCK_ELEMENTS = 1 << 20  # logits computed before other tasks get their turn
EMIT_EVERY_S = 0.02  # how long made tokens may wait before they are handed over


class ReferenceEngine(PlainEngine):
    """Implements `server.engine.Engine`. `canary`: logits also depend on one committed tensor (see `canary_bias`)."""

    def __init__(
        self,
        model: Path | None = None,
        *,
        seed: int = 0,
        canary: bool = False,
        vocab_size: int = 64,
        max_context: int = 4096,
        max_running: int = 256,
        token_delay_s: float = 0.0,
    ) -> None:
        """Raises ValueError for a model folder that cannot be read."""
        folder = ModelFolder(model) if model is not None else None
        self.identity: ModelIdentity = (
            folder.identity if folder is not None else built_in(vocab_size=vocab_size, max_context=max_context)
        )
        self.capabilities = EngineCapabilities(
            logprob_modes=(LogprobMode.RAW, LogprobMode.TEMPERATURE, LogprobMode.SAMPLING),
            pause_modes=("abort", "wait", "keep"),
            kv_policies=("recompute", "retain"),
            deterministic_seed=True,
        )
        self._table = LogitTable(seed, self.identity.vocab_size)
        self._canary = canary_tensor(self.identity.tensors, self.identity.vocab_size) if canary else None
        if self._canary is not None:
            data = folder.read(self._canary.name) if folder is not None else memoryview(bytes(self._canary.nbytes))
            self._table.bias_V = canary_bias(self._canary, data, self.identity.vocab_size)
        self._max_running, self._token_delay_s = max_running, token_delay_s
        self._works: dict[str, _Work] = {}
        self._waiting: deque[_Row] = deque()
        self._rows: list[_Row] = []
        self._paused = False
        self._steps = 0
        self._emitted_at = 0.0
        self._wake = Signal()
        self._loop_task: asyncio.Task[None] | None = None

    def check(self, request: EngineRequest) -> None:
        """Everything that the protocol names is honoured exactly, except stop strings, which the kit refuses."""

    async def generate(self, request: EngineRequest) -> AsyncGenerator[PromptRead | TokensMade | SampleEnded]:
        work = _Work(request)
        self._works[request.request_id] = work
        self._waiting.extend(work.rows)
        self._start()
        try:
            left = request.num_samples
            while left:
                if not work.items:
                    await work.arrived.wait()
                if work.failure is not None:
                    raise work.failure
                items, work.items = work.items, []
                for item in items:
                    left -= isinstance(item, SampleEnded)
                    yield item
        finally:
            self._drop(work)

    async def abort(self, request_id: str) -> None:
        work = self._works.get(request_id)
        if work is not None:
            for row in work.rows:
                self._end(row, FinishReason.ABORTED)
            self._sweep()

    async def pause(self, mode: str, *, clear_cache: bool) -> None:
        """There is no KV to clear. Never called while a step is half done: steps do not await inside a block."""
        while mode == "wait" and (self._rows or self._waiting):
            await self._wake.wait(0.01)
        self._paused = True
        for row in (*self._rows, *self._waiting) if mode == "abort" else ():
            self._end(row, FinishReason.PAUSED)
        self._sweep()
        self._emit()

    async def resume(self) -> None:
        self._paused = False
        self._wake.fire()

    def tokens_made(self) -> Mapping[str, list[int]]:
        return {request_id: [len(row.output) for row in work.rows] for request_id, work in self._works.items()}

    async def load_weights(self, tensors: Iterator[tuple[TensorLayout, memoryview]]) -> None:
        for layout, data in tensors:
            if layout == self._canary:
                bias_V = await asyncio.to_thread(canary_bias, layout, data, self.identity.vocab_size)
                self._table.bias_V = bias_V

    def load(self) -> EngineLoad:
        used = len(self._rows) / self._max_running
        return EngineLoad(len(self._rows), len(self._waiting), used, self._steps)

    async def close(self) -> None:
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.wait((self._loop_task,))

    def _start(self) -> None:
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = asyncio.create_task(self._run(), name="reference engine")
        self._wake.fire()

    async def _run(self) -> None:
        try:
            while True:
                if self._paused or not (self._rows or self._waiting):
                    await self._wake.wait()
                    continue
                while self._waiting and len(self._rows) < self._max_running:
                    self._rows.append(self._waiting.popleft())
                await self._step()
                await asyncio.sleep(self._token_delay_s)
        except Exception as error:
            for work in self._works.values():
                work.fail(error)
            raise

    async def _step(self) -> None:
        """One token for every running row, in blocks; a pause between two blocks leaves the others for later."""
        block = max(1, BLOCK_ELEMENTS // self.identity.vocab_size)
        rows = list(self._rows)
        for start in range(0, len(rows), block):
            if start:
                await asyncio.sleep(0)
            if self._paused:
                return
            self._advance([row for row in rows[start : start + block] if row.ended is None])
        self._steps += 1
        self._sweep()
        if self._token_delay_s or time.monotonic() - self._emitted_at > EMIT_EVERY_S:
            self._emit()

    def _advance(self, rows: list[_Row]) -> None:
        if not rows:
            return
        logits_RV = self._table.logits(np.array([row.last for row in rows], np.int64))
        u_R = uniforms(
            np.array([row.seed for row in rows], np.uint64), np.array([len(row.output) for row in rows], np.int64)
        )
        tokens_R, logprobs_R = draw_plain(
            logits_RV,
            np.array([row.temperature for row in rows]),
            np.array([row.mode is LogprobMode.RAW for row in rows]),
            u_R,
        )
        tokens, logprobs = tokens_R.tolist(), logprobs_R.tolist()
        eos = self.identity.eos_token_ids
        for i, row in enumerate(rows):
            forbidden = row.forbidden(eos)
            if forbidden or row.is_shaped:
                tokens[i], logprobs[i] = row.draw(logits_RV[i], float(u_R[i]), forbidden)
            row.append(tokens[i], logprobs[i])
            reason = row.stop_reason(tokens[i], eos)
            if reason is not None:
                self._end(row, reason, tokens[i] if reason is FinishReason.STOP_TOKEN else None)

    def _end(self, row: _Row, reason: FinishReason, stop_match: int | None = None) -> None:
        if row.ended is None:
            row.flush()
            row.ended = SampleEnded(row.index, reason, stop_match)
            row.work.items.append(row.ended)
            row.work.arrived.fire()

    def _sweep(self) -> None:
        """Forgets ended rows."""
        if any(row.ended is not None for row in self._rows):
            self._rows = [row for row in self._rows if row.ended is None]
        if any(row.ended is not None for row in self._waiting):
            self._waiting = deque(row for row in self._waiting if row.ended is None)

    def _emit(self) -> None:
        self._emitted_at = time.monotonic()
        for row in self._rows:
            if row.flush():
                row.work.arrived.fire()

    def _drop(self, work: _Work) -> None:
        if self._works.get(work.request_id) is work:
            del self._works[work.request_id]
        for row in work.rows:
            if row.ended is None:
                row.ended = SampleEnded(row.index, FinishReason.ABORTED)
        self._sweep()


class _Work:
    """The rows of one request, and what they made that was not read yet."""

    def __init__(self, request: EngineRequest) -> None:
        self.request_id = request.request_id
        self.items: list[TokensMade | SampleEnded] = []
        self.arrived = Signal()
        self.failure: Exception | None = None
        self.rows = [_Row(self, request, i) for i in range(request.num_samples)]

    def fail(self, error: Exception) -> None:
        self.failure = error
        self.arrived.fire()


class _Row:
    """One sample: its last four tokens, its own random stream, and tokens made but not handed over."""

    def __init__(self, work: _Work, request: EngineRequest, index: int) -> None:
        s = request.sampling
        self.work, self.index, self.sampling, self.mode = work, index, s, request.mode
        self.prompt = request.prompt_token_ids
        self.last = ([NO_TOKEN] * CONTEXT + self.prompt[-CONTEXT:].tolist())[-CONTEXT:]
        self.seed = ((s.seed or 0) + index) % 2**64
        self.temperature = s.temperature
        self.is_shaped = not s.is_full_distribution
        self.output: list[int] = []
        self.ended: SampleEnded | None = None
        self._stops = frozenset(s.stop_token_ids)
        self._limit = s.max_tokens or 0
        self._sent = 0
        self._logprobs: list[float] = []

    def forbidden(self, eos: tuple[int, ...]) -> tuple[int, ...]:
        """Tokens that would end the sample before `min_tokens`."""
        if len(self.output) >= self.sampling.min_tokens:
            return ()
        return (*self._stops, *(() if self.sampling.ignore_eos else eos))

    def draw(self, logits_V: np.ndarray, u: float, forbidden: tuple[int, ...]) -> tuple[int, float]:
        return draw_shaped(
            logits_V, self.sampling, self.mode, u, prompt=self.prompt, output=self.output, forbidden=forbidden
        )

    def append(self, token: int, logprob: float) -> None:
        self.output.append(token)
        self._logprobs.append(logprob)
        self.last = [*self.last[1:], token]

    def stop_reason(self, token: int, eos: tuple[int, ...]) -> FinishReason | None:
        if token in self._stops:
            return FinishReason.STOP_TOKEN
        if token in eos and not self.sampling.ignore_eos:
            return FinishReason.EOS
        return FinishReason.LENGTH if len(self.output) >= self._limit else None

    def flush(self) -> bool:
        """Hands over what was made; whether there was anything."""
        if self._sent == len(self.output):
            return False
        ids, logprobs = np.array(self.output[self._sent :], np.int32), np.array(self._logprobs, np.float32)
        self._sent, self._logprobs = len(self.output), []
        self.work.items.append(TokensMade(self.index, ids, logprobs))
        return True
