"""How probable given tokens are under a server's policy: the message that asks, and the answer, verified."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import numpy as np

from skyrl_rollout import wire
from skyrl_rollout.columns import joined_top
from skyrl_rollout.errors import CorruptBytes
from skyrl_rollout.events import refuse_changed
from skyrl_rollout.requests import version_policy
from skyrl_rollout.tokens import LogprobMode, Scores
from skyrl_rollout.v1 import generation_pb2


def score_request(
    token_ids: Sequence[int] | np.ndarray,
    score_from: int,
    *,
    mode: LogprobMode,
    temperature: float,
    top_logprobs: int,
    policy_id: str,
    min_weight_version: int | None,
) -> generation_pb2.ScoreRequest:
    """Raises ValueError for token ids that do not travel, and for a `score_from` that leaves nothing to score."""
    if not 1 <= score_from < len(token_ids):
        raise ValueError(f"score_from is {score_from}, expected 1 to {len(token_ids) - 1}: nothing precedes token 0")
    return generation_pb2.ScoreRequest(
        request_id=str(uuid.uuid4()),
        token_ids=wire.token_bytes(token_ids),
        score_from=score_from,
        logprobs=generation_pb2.LogprobOptions(mode=wire.LOGPROB_MODES[mode], top_k=top_logprobs),
        policy_id=policy_id,
        version=version_policy(min_weight_version),
        temperature=temperature,
    )


def scores_from_pb(
    request: generation_pb2.ScoreRequest, responses: Sequence[generation_pb2.ScoreResponse], mode: LogprobMode
) -> Scores:
    """Raises CorruptBytes where the responses do not cover every position once, mix versions or came changed."""
    parts, tops, end = [], [], request.score_from
    for m in responses:
        refuse_changed(m, f"scores from token {m.offset}")
        logprobs = np.frombuffer(m.logprobs, wire.LOGPROB_DTYPE) if len(m.logprobs) % 4 == 0 else np.empty(0)
        if m.offset != end or not len(logprobs):
            raise CorruptBytes(f"{len(m.logprobs)} bytes of scores from token {m.offset} arrived, {end} was next")
        try:
            tops.append(wire.top_from_pb(m.top, len(logprobs)) if m.HasField("top") else None)
        except ValueError as error:
            raise CorruptBytes(f"scores from token {m.offset}: {error}") from None
        parts.append(logprobs)
        end += len(logprobs)
    if end != len(request.token_ids) // 4 or len({m.weight_version for m in responses}) != 1:
        versions = sorted({m.weight_version for m in responses})
        raise CorruptBytes(
            f"tokens [{request.score_from}, {end}) of {len(request.token_ids) // 4} were scored, under {versions}"
        )
    try:
        top = joined_top(tops)
    except ValueError as error:
        raise CorruptBytes(str(error)) from None
    if (0 if top is None else top.token_ids.shape[1]) != request.logprobs.top_k:
        raise CorruptBytes(f"the top {request.logprobs.top_k} logprobs were asked for, others arrived")
    return Scores(np.concatenate(parts).astype(np.float32), responses[0].weight_version, mode, top)
