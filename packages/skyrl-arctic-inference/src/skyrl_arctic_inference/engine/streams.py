"""What vLLM has produced for each running request, counted when it is produced and read when the reader comes.

vLLM's output handler calls `SampleTokens.put` synchronously for every engine step, so `num_made` is what the engine
made, whether or not anybody has read it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from skyrl_rollout.server.engine import EngineRequest, SampleEnded, TokensMade
from skyrl_rollout.tokens import FinishReason

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput


class SampleTokens:
    """One sample. `engine_id` is vLLM's id of it once it was submitted, "" before."""

    def __init__(self, index: int, eos_token_ids: frozenset[int], ready: asyncio.Event) -> None:
        self.index = index
        self.engine_id = ""
        self.num_made = 0
        self.abort_reason = FinishReason.ABORTED
        self.error: BaseException | None = None
        self.ended: SampleEnded | None = None
        self._eos_token_ids = eos_token_ids
        self._ready = ready
        self._ids: list[int] = []
        self._logprobs: list[float] = []
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
            self._take_step(output.outputs[0])
        self._ready.set()

    def end(self, reason: FinishReason) -> None:
        """Ends a sample that the engine never saw."""
        self.ended = SampleEnded(self.index, reason)
        self._ready.set()

    def drain(self) -> Iterator[TokensMade | SampleEnded]:
        """What the reader has not seen, the end last. Raises the engine's error after the tokens before it."""
        while self._ids:  # the engine goes on while the reader has what was yielded
            ids, logprobs = self._ids, self._logprobs
            self._ids, self._logprobs = [], []
            yield TokensMade(self.index, np.asarray(ids, np.int32), np.asarray(logprobs, np.float32))
        if self.error is not None:
            raise self.error
        if self.ended is not None and not self._told_end:
            self._told_end = True
            yield self.ended

    def _take_step(self, made: CompletionOutput) -> None:
        if count := len(made.token_ids):
            self._ids.extend(made.token_ids)
            self._logprobs.extend(sampled_logprobs(made, count))
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
        self.ended = SampleEnded(self.index, reason, match)


class RequestTokens:
    """All samples of one request and the event that wakes their one reader."""

    def __init__(self, request: EngineRequest, eos_token_ids: frozenset[int]) -> None:
        self.request = request
        self.ready = asyncio.Event()
        eos = frozenset() if request.sampling.ignore_eos else eos_token_ids
        self.samples = [SampleTokens(i, eos, self.ready) for i in range(request.num_samples)]
        self.ending: FinishReason | None = None

    @property
    def counts(self) -> list[int]:
        """Tokens made so far per sample."""
        return [s.num_made for s in self.samples]

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


def sampled_logprobs(made: CompletionOutput, count: int) -> list[float]:
    """The sampled tokens' logprobs [count]; NaN where vLLM gave none.

    vLLM hands over the whole history with an empty step and the last `count` positions otherwise; the first entry of
    a position is the sampled token.
    """
    flat = made.logprobs
    if not flat or len(flat) < count:
        return [float("nan")] * count
    starts, ends = flat.start_indices[-count:], flat.end_indices[-count:]
    return [flat.logprobs[a] if b > a else float("nan") for a, b in zip(starts, ends, strict=True)]
