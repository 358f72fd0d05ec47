"""An engine without a model: deterministic tokens for many requests at once, paused exactly between two tokens."""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np

from skyrl_rollout.reference.forced import forced_logprobs
from skyrl_rollout.reference.holdings import Holdings
from skyrl_rollout.reference.logits import LogitTable, canary_bias, canary_tensor, has_nan
from skyrl_rollout.reference.model import ModelFolder, built_in
from skyrl_rollout.reference.prefix_cache import PrefixCache
from skyrl_rollout.reference.rows import Row, Work
from skyrl_rollout.reference.sampling import draw_plain, uniforms
from skyrl_rollout.server.engine import (
    EngineCapabilities,
    EngineLoad,
    EngineRequest,
    EngineScoreRequest,
    ModelIdentity,
    PromptRead,
    SampleEnded,
    TokensMade,
    TokensScored,
    TopK,
)
from skyrl_rollout.server.signals import Signal
from skyrl_rollout.tokens import FinishReason, LogprobMode
from skyrl_rollout.weights.manifest import TensorLayout

BLOCK_ELEMENTS = 1 << 20  # logits computed before other tasks get their turn
EMIT_EVERY_S = 0.02  # how long made tokens may wait before they are handed over
TOKEN_DELAY = "token_delay_s"  # the backend option: about so long between two tokens of a sample
MAX_TOKEN_DELAY_S = 10.0


class ReferenceEngine(Holdings):
    """Implements `server.engine.Engine`. canary: logits also depend on one committed tensor (see `canary_bias`).

    token_delay_s: about so long between two tokens of a sample, unless the request has its own.
    """

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
            stop_strings=True,
            max_top_logprobs=self.identity.vocab_size,
            prompt_logprobs=True,
            cached_prompt_tokens=True,
            score=True,
            priority=True,
            extras=("routed_experts", "top_p_token_ids"),
            backend_options=(TOKEN_DELAY,),
            reset_cache=True,
            sleep_levels=("offload", "discard"),
            lora=True,
        )
        self._table = LogitTable(seed, self.identity.vocab_size)
        self._is_broken = False  # the canary holds NaN: tokens flow, their logprobs are unknown
        self._canary = canary_tensor(self.identity.tensors, self.identity.vocab_size) if canary else None
        if self._canary is not None:
            data = folder.read(self._canary.name) if folder is not None else memoryview(bytes(self._canary.nbytes))
            self._table.bias_V = canary_bias(self._canary, data, self.identity.vocab_size)
            self._is_broken = has_nan(self._canary, data, self.identity.vocab_size)
        self._reads_weights = canary
        self._adapter_biases: dict[str, np.ndarray] = {}
        self.prefix_cache = PrefixCache()
        self._max_running, self._token_delay_s = max_running, token_delay_s
        self._works: dict[str, Work] = {}
        self._waiting: list[tuple[int, int, Row]] = []  # a heap: (-priority, order of arrival, row)
        self._arrivals = count()
        self._rows: list[Row] = []
        self._paused = False
        self._steps = 0
        self._step_at = self._emitted_at = 0.0
        self._wake = Signal()
        self._loop_task: asyncio.Task[None] | None = None

    def check(self, request: EngineRequest) -> None:
        """Raises ValueError for a token delay that is none, and for prompt logprobs in a distribution that depends on
        what is output. Everything else that the protocol names is honoured exactly; stop strings by `rows.text_of`."""
        delay_s = request.backend_options.get(TOKEN_DELAY, 0.0)
        if not isinstance(delay_s, int | float) or not 0 <= delay_s <= MAX_TOKEN_DELAY_S:
            raise ValueError(f"backend option {TOKEN_DELAY} is {delay_s!r}, expected 0 to {MAX_TOKEN_DELAY_S:g} s")
        plain = request.sampling.is_full_distribution or request.sampling.is_greedy
        if request.prompt_last_n and request.mode is LogprobMode.SAMPLING and not plain:
            raise ValueError("a prompt was not drawn with penalties, top_k, top_p or min_p: ask for RAW or TEMPERATURE")

    async def generate(self, request: EngineRequest) -> AsyncGenerator[PromptRead | TokensMade | SampleEnded]:
        work = Work(request, float(request.backend_options.get(TOKEN_DELAY, self._token_delay_s)))
        self._works[request.request_id] = work
        try:
            yield await self._read_prompt(request)
            for row in work.rows:
                if row.ended is None:
                    heapq.heappush(self._waiting, (-row.priority, next(self._arrivals), row))
            self._start()
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
                self._end(row, SampleEnded(row.index, FinishReason.ABORTED))
            self._sweep()

    async def pause(self, mode: str, *, clear_cache: bool) -> None:
        """Never called while a step is half done: steps do not await inside a block."""
        while mode == "wait" and (self._rows or self._waiting):
            await self._wake.wait(0.01)
        self._paused = True
        for work in self._works.values() if mode == "abort" else ():
            for row in work.rows:
                self._end(row, SampleEnded(row.index, FinishReason.PAUSED))
        if clear_cache:
            self.prefix_cache.drop()
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
                self._table.bias_V, self._is_broken = bias_V, has_nan(layout, data, self.identity.vocab_size)

    def check_score(self, request: EngineScoreRequest) -> None:
        """Every mode and temperature is exact; there are no sampling parameters, so SAMPLING is TEMPERATURE."""

    async def score(self, request: EngineScoreRequest) -> AsyncGenerator[TokensScored]:
        tokens, start = request.token_ids, request.score_from
        scale = request.temperature if request.temperature and request.mode is not LogprobMode.RAW else 1.0
        logprobs, top = await self._forced(tokens, start, scale, request.policy_id, request.top_logprobs)
        yield TokensScored(logprobs, top)

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
                    self._rows.append(heapq.heappop(self._waiting)[2])
                await self._step()
                idle_s = min((row.due_at for row in self._rows), default=0.0) - time.monotonic()
                if idle_s > 0:
                    await self._wake.wait(idle_s)
                else:
                    await asyncio.sleep(0)
        except Exception as error:
            for work in self._works.values():
                work.fail(error)
            raise

    async def _step(self) -> None:
        """One token for every running row that is due, in blocks; a pause between two blocks leaves the others for
        later."""
        block = max(1, BLOCK_ELEMENTS // self.identity.vocab_size)
        self._step_at = time.monotonic()
        rows = [row for row in self._rows if row.due_at <= self._step_at]
        for start in range(0, len(rows), block):
            if start:
                await asyncio.sleep(0)
            if self._paused:
                return
            self._advance([row for row in rows[start : start + block] if row.ended is None])
        self._steps += bool(rows)
        self._sweep()
        if time.monotonic() - self._emitted_at > EMIT_EVERY_S:
            self._emit()

    def _advance(self, rows: list[Row]) -> None:
        if not rows:
            return
        logits_RV = self._logits(rows)
        u_R = uniforms(
            np.array([row.seed for row in rows], np.uint64), np.array([len(row.output) for row in rows], np.int64)
        )
        tokens_R, reported_RV = draw_plain(
            logits_RV,
            np.array([row.temperature for row in rows]),
            np.array([row.mode is LogprobMode.RAW for row in rows]),
            u_R,
        )
        if self._is_broken:
            reported_RV.fill(math.nan)
        tokens, logprobs = tokens_R.tolist(), reported_RV[np.arange(len(rows)), tokens_R].tolist()
        eos = self.identity.eos_token_ids
        for i, row in enumerate(rows):
            draw, forbidden = None, row.forbidden(eos)
            if forbidden or row.is_shaped:
                draw = row.draw(logits_RV[i], float(u_R[i]), forbidden)
                tokens[i], logprobs[i] = draw.token, math.nan if self._is_broken else draw.logprobs_V[draw.token]
            row.append(tokens[i], logprobs[i])
            if row.beside is not None:
                row.beside.note(reported_RV[i] if draw is None or self._is_broken else draw.logprobs_V, draw)
            if (ended := row.end_after(tokens[i], eos)) is not None:
                self._end(row, ended)
            elif row.delay_s:
                row.due_at = round(self._step_at / row.delay_s + 1) * row.delay_s  # rows of one delay step together
                self._hand_over(row)

    def _logits(self, rows: list[Row]) -> np.ndarray:
        """float64 [R, V], each row under its own policy."""
        logits_RV = self._table.logits(np.array([row.last for row in rows], np.int64))
        if self._adapter_biases:
            for i, row in enumerate(rows):
                if row.policy_id:
                    logits_RV[i] += self._adapter_biases[row.policy_id]
        return logits_RV

    async def _read_prompt(self, request: EngineRequest) -> PromptRead:
        prompt, n, s = request.prompt_token_ids, request.prompt_last_n, request.sampling
        cached = self.prefix_cache.read(request.cache_salt, prompt)
        if not n:
            return PromptRead(cached)
        if len(prompt) == 1:
            return PromptRead(cached, np.full(1, math.nan, np.float32))
        scale = 1.0 if s.is_greedy or request.mode is LogprobMode.RAW else s.temperature
        start = max(len(prompt) - n, 1)
        logprobs, _ = await self._forced(prompt, start, scale, request.policy_id, 0)
        return PromptRead(cached, np.concatenate([np.full(n - len(logprobs), math.nan, np.float32), logprobs]))

    async def _forced(
        self, tokens: np.ndarray, start: int, scale: float, policy_id: str, top: int
    ) -> tuple[np.ndarray, TopK | None]:
        """`forced_logprobs` under one version: new weights meanwhile make it start over."""
        while True:
            weights = (self._table.bias_V, self._adapter_biases.get(policy_id))
            logprobs, top_k = await forced_logprobs(self._table, weights[1], tokens, start, scale=scale, top=top)
            if weights[0] is self._table.bias_V and weights[1] is self._adapter_biases.get(policy_id):
                break
        if self._is_broken:
            logprobs.fill(math.nan)
            top_k = None if top_k is None else TopK(top_k.token_ids, np.full_like(top_k.logprobs, math.nan))
        return logprobs, top_k

    def _end(self, row: Row, ended: SampleEnded) -> None:
        if row.ended is None:
            row.flush()
            row.ended = replace(ended, num_preemptions=row.num_preemptions)
            row.work.items.append(row.ended)
            row.work.arrived.fire()

    def _sweep(self) -> None:
        """Forgets ended rows."""
        if any(row.ended is not None for row in self._rows):
            self._rows = [row for row in self._rows if row.ended is None]
        if any(row.ended is not None for _, _, row in self._waiting):
            self._waiting = [entry for entry in self._waiting if entry[2].ended is None]
            heapq.heapify(self._waiting)

    def _emit(self) -> None:
        self._emitted_at = time.monotonic()
        for row in self._rows:
            self._hand_over(row)

    def _hand_over(self, row: Row) -> None:
        if row.flush():
            row.work.arrived.fire()

    def _drop(self, work: Work) -> None:
        if self._works.get(work.request_id) is work:
            del self._works[work.request_id]
        for row in work.rows:
            if row.ended is None:
                row.ended = SampleEnded(row.index, FinishReason.ABORTED)
        self._sweep()
