"""One score request on vLLM: what it is asked for, and the positions that come back from one forward pass."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

from skyrl_rollout.errors import Paused
from skyrl_rollout.server.engine import EngineScoreRequest, TokensScored
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from skyrl_arctic_inference.engine.rows import given_rows
from skyrl_arctic_inference.engine.spans import score_span

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

POSITIONS_PER_ITEM = 1024


class Score:
    """One score request as vLLM sees it.

    `put` takes vLLM's outputs; `engine_id` is vLLM's id once it was submitted.
    """

    def __init__(self, request: EngineScoreRequest) -> None:
        self.request = request
        self.engine_id = ""
        self.done = asyncio.Event()
        self._output: RequestOutput | Exception | None = None

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.request.token_ids[:-1].tolist()

    def sampling(self) -> SamplingParams:
        """One greedy token, which nobody reads."""
        request = self.request
        return SamplingParams(
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            prompt_logprobs=request.top_logprobs,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=score_span(request).as_extra_args(),
        )

    def put(self, output: RequestOutput | Exception) -> None:
        self._output = output
        self.done.set()

    def rows(self) -> Iterator[TokensScored]:
        """All positions, once `done`. Raises the engine's error, or Paused when a pause ended it."""
        output = self._output
        assert output is not None
        if isinstance(output, Exception):
            raise output
        if output.outputs[0].finish_reason != "length":
            raise Paused("the score was ended by a pause or an abort: ask again", retry_after_s=1.0)
        count = len(self.request.token_ids) - self.request.score_from
        logprobs, top = given_rows(output.prompt_logprobs, count, self.request.top_logprobs)
        for start in range(0, count, POSITIONS_PER_ITEM):
            part = slice(start, start + POSITIONS_PER_ITEM)
            best = None if top is None else type(top)(top.token_ids[part], top.logprobs[part])
            yield TokensScored(logprobs[part], best)
