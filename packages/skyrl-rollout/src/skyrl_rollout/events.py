"""What arrives on a generation stream, event by event, as tuples and arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from skyrl_rollout import wire
from skyrl_rollout.errors import CorruptBytes, ProtocolMismatch
from skyrl_rollout.tokens import FinishReason, LogprobMode, Sampling, TopK, VersionSpan
from skyrl_rollout.v1 import generation_pb2


class Started(NamedTuple):
    """The request was admitted. A second one on the same iterator means a new run: what came before is void."""

    seq: int
    instance_id: str
    weight_version: int
    effective: Sampling
    mode: LogprobMode
    cached_prompt_tokens: int
    prompt_token_digest: bytes
    prompt_logprobs: np.ndarray | None = None


class Delta(NamedTuple):
    """New tokens of one sample, all of one version. token_ids int32 [k], logprobs float32 [k], and what was asked for
    beside them: top, and by name the extras with k rows each. Arrays are read-only."""

    seq: int
    sample_index: int
    offset: int
    token_ids: np.ndarray
    logprobs: np.ndarray
    weight_version: int
    oldest_kv_version: int
    top: TopK | None = None
    extras: Mapping[str, np.ndarray] = {}


class SampleFinished(NamedTuple):
    """A sample is complete; spans cover [0, num_tokens). token_digest: xxh3-128 of its int32 ids."""

    seq: int
    sample_index: int
    reason: FinishReason
    num_tokens: int
    token_digest: bytes
    spans: tuple[VersionSpan, ...]
    stop_match: int | str | None
    invalid_logprobs: int
    num_preemptions: int


class Heartbeat(NamedTuple):
    """Still alive. phase: "queued", "running" or "paused"."""

    seq: int
    phase: str
    tokens_so_far: int


Event = Started | Delta | SampleFinished | Heartbeat

_PHASES = {
    generation_pb2.Heartbeat.PHASE_QUEUED: "queued",
    generation_pb2.Heartbeat.PHASE_RUNNING: "running",
    generation_pb2.Heartbeat.PHASE_PAUSED: "paused",
}


def event_from_pb(pb: generation_pb2.GenerateResponse) -> Event | None:
    """None for a kind of event that this side does not know. Raises CorruptBytes for arrays that do not fit."""
    kind = pb.WhichOneof("event")
    if kind == "delta":
        return _delta(pb.seq, pb.delta)
    if kind == "heartbeat":
        return Heartbeat(pb.seq, _PHASES.get(pb.heartbeat.phase, "unknown"), pb.heartbeat.tokens_so_far)
    if kind == "sample_finished":
        return _sample_finished(pb.seq, pb.sample_finished)
    if kind == "started":
        return _started(pb.seq, pb.started)
    return None


def refuse_changed(pb: wire.Checked, where: str) -> None:
    """Raises CorruptBytes where the arrays of a message are not those that its checksum was made of."""
    if not wire.is_as_sent(pb):
        raise CorruptBytes(
            f"{where}: what arrived is not what was sent (crc32c): ask again, and if it happens again use grpcs://"
        )


def _delta(seq: int, pb: generation_pb2.TokenDelta) -> Delta:
    refuse_changed(pb, f"sample {pb.sample_index} at token {pb.offset}")
    ids, logprobs = pb.token_ids, pb.logprobs
    if len(ids) != len(logprobs) or len(ids) % 4:
        raise CorruptBytes(
            f"sample {pb.sample_index} at token {pb.offset}: {len(ids)} bytes of ids and {len(logprobs)} bytes of "
            "logprobs; both are 4 bytes a token"
        )
    return Delta(
        seq,
        pb.sample_index,
        pb.offset,
        np.frombuffer(ids, wire.TOKEN_DTYPE),
        np.frombuffer(logprobs, wire.LOGPROB_DTYPE),
        pb.weight_version,
        pb.oldest_kv_version,
        *_beside(pb, len(ids) // 4),
    )


def _beside(pb: generation_pb2.TokenDelta, count: int) -> tuple[TopK | None, dict[str, np.ndarray]]:
    where = f"sample {pb.sample_index} at token {pb.offset}"
    try:
        top = wire.top_from_pb(pb.top, count) if pb.HasField("top") else None
        extras = {name: wire.tensor_from_pb(pb.extras[name]) for name in pb.extras}
    except ValueError as error:
        raise CorruptBytes(f"{where}: {error}") from None
    for name, array in extras.items():
        if array.shape[:1] != (count,):
            raise CorruptBytes(f"{where}: {name} has shape {list(array.shape)} for {count} tokens")
    return top, extras


def _sample_finished(seq: int, pb: generation_pb2.SampleFinished) -> SampleFinished:
    try:
        reason = FinishReason(pb.reason)
    except ValueError:
        raise ProtocolMismatch(
            f"sample {pb.sample_index} ended for reason {pb.reason}, which this client does not know: upgrade it"
        ) from None
    matched = pb.WhichOneof("matched")
    return SampleFinished(
        seq,
        pb.sample_index,
        reason,
        pb.num_tokens,
        pb.token_digest,
        wire.spans_from_pb(pb.spans),
        None if matched is None else getattr(pb, matched),
        pb.invalid_logprobs,
        pb.num_preemptions,
    )


def _started(seq: int, pb: generation_pb2.Started) -> Started:
    try:
        mode = LogprobMode(pb.mode)
    except ValueError:
        raise ProtocolMismatch(f"the server answers in logprob mode {pb.mode}, which nobody asked for") from None
    refuse_changed(pb, "logprobs of the prompt")
    return Started(
        seq,
        pb.instance_id,
        pb.weight_version,
        wire.sampling_from_pb(pb.effective),
        mode,
        pb.cached_prompt_tokens,
        pb.prompt_token_digest,
        np.frombuffer(pb.prompt_logprobs, wire.LOGPROB_DTYPE) if pb.prompt_logprobs else None,
    )
