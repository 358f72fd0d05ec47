"""What vLLM has produced for each running request, counted when it is produced and read when the reader comes.

vLLM's output handler calls `SampleTokens.put` synchronously for every engine step, so `num_made` is what the engine
made, whether or not anybody has read it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from skyrl_rollout.server.engine import EngineRequest, PromptRead, SampleEnded, TokensMade
from skyrl_rollout.tokens import FinishReason

from skyrl_arctic_inference.engine.rows import prompt_logprobs, sampled_logprobs, top_of, unknown

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput


class SampleTokens:
    """One sample. `engine_id` is vLLM's id of it once it was submitted, "" before. prompt: what its first step said
    about the prompt, whose last `prompt_last_n` tokens need a logprob."""

    def __init__(
        self,
        index: int,
        eos_token_ids: frozenset[int],
        ready: asyncio.Event,
        *,
        num_top: int = 0,
        prompt_last_n: int = 0,
    ) -> None:
        self.index = index
        self.engine_id = ""
        self.num_made = 0
        self.num_preemptions = 0
        self.prompt: PromptRead | None = None
        self.abort_reason = FinishReason.ABORTED
        self.error: BaseException | None = None
        self.ended: SampleEnded | None = None
        self._eos_token_ids = eos_token_ids
        self._ready = ready
        self._num_top, self._prompt_last_n = num_top, prompt_last_n
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._top: list[tuple[list[int], list[float]]] = []
        self._told_end = False

    @property
    def is_done(self) -> bool:
        """Whether the engine has ended it."""
        return self.ended is not None or self.error is not None

    def put(self, output: RequestOutput | Exception) -> None:
        """vLLM's side of the queue: takes the new tokens of one step, or the error that ended everything."""
        if isinstance(output, Exception):
            self.error = output
        else:
            if self.prompt is None:
                self.prompt = self._read_prompt(output)
            self._take_step(output.outputs[0])
        self._ready.set()

    def end(self, reason: FinishReason) -> None:
        """Ends a sample that the engine never saw."""
        self.ended = SampleEnded(self.index, reason)
        self._ready.set()

    def drain(self) -> Iterator[TokensMade | SampleEnded]:
        """What the reader has not seen, the end last. Raises the engine's error after the tokens before it."""
        while self._ids:  # the engine goes on while the reader has what was yielded
            ids, logprobs, top = self._ids, self._logprobs, self._top
            self._ids, self._logprobs, self._top = [], [], []
            yield TokensMade(
                self.index,
                np.asarray(ids, np.int32),
                np.asarray(logprobs, np.float32),
                top_of(top, self._num_top) if self._num_top else None,
            )
        if self.error is not None:
            raise self.error
        if self.ended is not None and not self._told_end:
            self._told_end = True
            yield self.ended

    def _take_step(self, made: CompletionOutput) -> None:
        if count := len(made.token_ids):
            self._ids.extend(made.token_ids)
            logprobs, top = sampled_logprobs(made.logprobs, count, self._num_top)
            self._logprobs.extend(logprobs)
            self._top.extend(top)
            self.num_made += count
        if made.finish_reason is not None:
            self._finish(made)

    def _finish(self, made: CompletionOutput) -> None:
        reason, match = self.abort_reason, None
        if made.finish_reason == "length":
            reason = FinishReason.LENGTH
        elif made.finish_reason == "stop":
            match = made.stop_reason
            if isinstance(match, str):
                reason = FinishReason.STOP_STRING
            else:
                reason = FinishReason.EOS if match in self._eos_token_ids else FinishReason.STOP_TOKEN
        elif made.finish_reason != "abort":
            self.error = RuntimeError(f"vLLM ended the sample with {made.finish_reason!r}; its log says why")
            return
        self.ended = SampleEnded(self.index, reason, match, self.num_preemptions)

    def _read_prompt(self, output: RequestOutput) -> PromptRead:
        logprobs = prompt_logprobs(output.prompt_logprobs, self._prompt_last_n) if self._prompt_last_n else None
        return PromptRead(output.num_cached_tokens or 0, logprobs)


class RequestTokens:
    """All samples of one request and the event that wakes their one reader."""

    def __init__(self, request: EngineRequest, eos_token_ids: frozenset[int]) -> None:
        self.request = request
        self.ready = asyncio.Event()
        eos = frozenset() if request.sampling.ignore_eos else eos_token_ids
        top, last = request.top_logprobs, request.prompt_last_n
        self.samples = [
            SampleTokens(i, eos, self.ready, num_top=top, prompt_last_n=0 if i else last)
            for i in range(request.num_samples)
        ]
        self.ending: FinishReason | None = None
        self._told_prompt = False

    @property
    def counts(self) -> list[int]:
        """Tokens made so far per sample."""
        return [s.num_made for s in self.samples]

    def drain(self) -> Iterator[PromptRead | TokensMade | SampleEnded]:
        """What the reader has not seen: the prompt, as the first sample found it, before any token."""
        first = self.samples[0]
        if not self._told_prompt:
            if first.prompt is None and not first.is_done:
                return
            self._told_prompt = True
            last_n = self.request.prompt_last_n
            yield first.prompt or PromptRead(0, unknown(last_n) if last_n else None)
        for sample in self.samples:
            yield from sample.drain()

    @property
    def live_ids(self) -> list[str]:
        """vLLM's ids of the samples that it still works on."""
        return [s.engine_id for s in self.samples if s.engine_id and not s.is_done]

    @property
    def is_done(self) -> bool:
        return all(s.is_done for s in self.samples)

    def end_with(self, reason: FinishReason) -> None:
        """From here on, samples that vLLM aborts, or that were not submitted yet, end for this reason."""
        self.ending = reason
        for s in self.samples:
            s.abort_reason = reason
