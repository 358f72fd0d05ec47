"""How probable given tokens are: Score calls, admitted like generations and answered under one weight version each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count

import numpy as np

from skyrl_rollout.columns import cut_rows, joined_top
from skyrl_rollout.errors import InvalidRequest, MissingCapability, RolloutError
from skyrl_rollout.server.admission import TOP_LOGPROB_BYTES, cache_key, check_logprobs, check_rows, check_tokens
from skyrl_rollout.server.engine import Engine, EngineScoreRequest, TokensScored
from skyrl_rollout.server.options import ServerOptions
from skyrl_rollout.server.registry import RunRegistry, max_event_bytes
from skyrl_rollout.server.state import EngineState, ServerState
from skyrl_rollout.tokens import LogprobMode, Scores, TopK

LOGPROB_BYTES = 4


@dataclass(frozen=True)
class ScoringRequest:
    """One Score call: logprobs are wanted of token_ids[score_from:], int32 [S]."""

    request_id: str
    token_ids: np.ndarray
    score_from: int
    mode: LogprobMode
    temperature: float
    top_logprobs: int
    policy_id: str
    min_weight_version: int


@dataclass(frozen=True)
class ScoreChunk:
    """Logprobs float32 [n] of the tokens from `offset` on, and the most probable tokens there."""

    offset: int
    logprobs: np.ndarray
    top: TopK | None
    weight_version: int


class Scorer:
    """Answers are complete before their first byte is sent. A pause, a commit or another state that stops generations
    makes a score that is under way start over, so that no answer mixes versions."""

    def __init__(self, engine: Engine, state: ServerState, runs: RunRegistry, options: ServerOptions) -> None:
        self._engine, self._state, self._runs, self._options = engine, state, runs, options
        self._numbers = count()

    async def score(self, request: ScoringRequest) -> Scores:
        """Waits until the version asked for serves; the caller's deadline bounds that. Raises InvalidRequest,
        MissingCapability, UnknownPolicy, Overloaded, or the reason why new work is refused."""
        self._state.refuse_new_work()
        self._state.version_of(request.policy_id)
        self._check(request)
        with self._runs.slot():
            while True:
                await self._state.admission(request.min_weight_version, request.policy_id)
                versions = self._versions(request)
                parts = await self._once(self._engine_request(request, versions), versions)
                if parts is not None:
                    return _joined(parts, request, versions[0])

    def chunks(self, request: ScoringRequest, scores: Scores) -> Iterator[ScoreChunk]:
        """The answer in pieces that fit into a message."""
        row_bytes = LOGPROB_BYTES + TOP_LOGPROB_BYTES * request.top_logprobs
        most = max(1, max_event_bytes(self._options) // row_bytes)
        for start in range(0, len(scores.logprobs), most):
            top, _ = cut_rows(scores.top, {}, start, start + most)
            logprobs = scores.logprobs[start : start + most]
            yield ScoreChunk(request.score_from + start, logprobs, top, scores.weight_version)

    def _check(self, r: ScoringRequest) -> None:
        model, offers = self._engine.identity, self._engine.capabilities
        if not offers.score:
            raise MissingCapability.named("score", "Score")
        check_tokens(r.token_ids, "token_ids", model)
        if len(r.token_ids) > model.max_context:
            raise InvalidRequest(f"token_ids has {len(r.token_ids)} tokens and the context is {model.max_context}")
        if not 1 <= r.score_from < len(r.token_ids):
            raise InvalidRequest(
                f"score_from is {r.score_from}, expected 1 to {len(r.token_ids) - 1}: nothing precedes token 0"
            )
        if not 0 <= r.temperature < np.inf:
            raise InvalidRequest(f"temperature is {r.temperature}, expected finite and at least 0")
        check_logprobs(r.mode, r.top_logprobs, model, offers)
        asked = TOP_LOGPROB_BYTES * r.top_logprobs, len(r.token_ids) - r.score_from
        check_rows(*asked, "lower logprobs.top_k, or score fewer tokens at once", self._options)
        try:
            self._engine.check_score(self._engine_request(r, self._versions(r)))
        except RolloutError:
            raise
        except ValueError as error:
            raise InvalidRequest(str(error)) from error

    def _versions(self, request: ScoringRequest) -> tuple[int, int]:
        """(of the request's policy, of the base)."""
        return self._state.version_of(request.policy_id), self._state.weight_version

    def _engine_request(self, r: ScoringRequest, versions: tuple[int, int]) -> EngineScoreRequest:
        return EngineScoreRequest(
            f"score {next(self._numbers)} {r.request_id}",
            r.token_ids,
            r.score_from,
            r.mode,
            r.temperature,
            r.top_logprobs,
            cache_key(r.policy_id, *versions),
            r.policy_id,
        )

    async def _once(self, request: EngineScoreRequest, versions: tuple[int, int]) -> list[TokensScored] | None:
        """None when the server stopped generating, or changed its weights, while it was computed."""
        work = asyncio.create_task(self._collect(request), name=request.request_id)
        try:
            while True:
                changed = asyncio.ensure_future(self._state.changed.wait())
                await asyncio.wait((work, changed), return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                if self._state.state not in (EngineState.SERVING, EngineState.DRAINING):
                    return None
                if work.done():
                    break
            now = (self._state.version_of(request.policy_id), self._state.weight_version)
            return work.result() if now == versions else None
        finally:
            work.cancel()
            await asyncio.wait((work,))

    async def _collect(self, request: EngineScoreRequest) -> list[TokensScored]:
        async with aclosing(self._engine.score(request)) as stream:
            return [part async for part in stream]


def _joined(parts: list[TokensScored], request: ScoringRequest, version: int) -> Scores:
    logprobs = np.concatenate([part.logprobs for part in parts]) if parts else np.empty(0, np.float32)
    top, wanted = joined_top([part.top for part in parts]), len(request.token_ids) - request.score_from
    shape = (0, 0) if top is None else top.token_ids.shape
    if len(logprobs) != wanted or shape != ((wanted, request.top_logprobs) if request.top_logprobs else (0, 0)):
        raise RolloutError(
            f"the engine scored {len(logprobs)} of {wanted} tokens with the top {shape[1]} of {request.top_logprobs}"
        )
    return Scores(logprobs, version, request.mode, top)
