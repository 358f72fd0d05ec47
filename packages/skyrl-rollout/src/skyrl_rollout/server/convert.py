"""Protobuf messages to dataclasses and back: the only place of the server kit that knows both."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import numpy as np
from google.protobuf import json_format
from google.protobuf.duration_pb2 import Duration

from skyrl_rollout import wire
from skyrl_rollout.errors import InvalidRequest
from skyrl_rollout.server import events
from skyrl_rollout.server.admission import GenerationRequest
from skyrl_rollout.server.scoring import ScoreChunk, ScoringRequest
from skyrl_rollout.tokens import LogprobMode
from skyrl_rollout.v1 import generation_pb2 as pb
from skyrl_rollout.weights.manifest import content_digest

MAX_SAMPLES = 1024
MAX_ID_CHARACTERS = 200
DEFAULT_MIN_TOKENS_PER_EVENT = 64
DEFAULT_MAX_EVENT_DELAY_S = 0.5
DEFAULT_HEARTBEAT_S = 10.0
MIN_HEARTBEAT_S = 0.05

MODE_NAMES = {number: name for name, number in wire.PAUSE_MODES.items()}
ADMISSION_NAMES = {number: name for name, number in wire.ADMISSIONS.items()}
EXTRA_NAMES = {number: name for name, number in wire.EXTRAS.items()}
ON_COMMIT_NAMES = {1: "continue", 2: "stop"}
KV_NAMES = {number: name for name, number in wire.KV_POLICIES.items()}


def known(value: int, names: Mapping[Any, Any], field: str, *, unset: Any) -> Any:
    """names[value]; 0 is `unset` (None: it must be set). Raises InvalidRequest for a value unknown to this server."""
    if value == 0 and unset is not None:
        return unset
    if value not in names:
        said = ", ".join(getattr(name, "name", str(name)) for name in names.values())
        raise InvalidRequest(f"{field} is {value}, expected one of {sorted(names)} ({said})")
    return names[value]


def seconds(message: Any, field: str, default: float) -> float:
    """A Duration field in seconds. Raises InvalidRequest when it is negative."""
    if not message.HasField(field):
        return default
    value = getattr(message, field).ToNanoseconds() / 1e9
    if value < 0:
        raise InvalidRequest(f"{field} is {value} s: a duration cannot be negative")
    return value


def duration(value_s: float) -> Duration:
    """The inverse of `seconds`."""
    d = Duration()
    d.FromNanoseconds(round(value_s * 1e9))
    return d


def number(value: enum.IntEnum) -> Any:
    """The number of an enum of ours, which is that of the protocol; the stubs' types allow only their own enums."""
    return value.value


def generation_request(m: pb.GenerateRequest) -> GenerationRequest:
    """Raises InvalidRequest for malformed fields."""
    if not m.request_id or len(m.request_id) > MAX_ID_CHARACTERS:
        raise InvalidRequest(f"request_id must have 1 to {MAX_ID_CHARACTERS} characters: mint a UUID for every request")
    if len(m.prompt_token_ids) % wire.TOKEN_DTYPE.itemsize:
        raise InvalidRequest(f"prompt_token_ids has {len(m.prompt_token_ids)} bytes, expected a multiple of 4 (int32)")
    num_samples = m.num_samples if m.HasField("num_samples") else 1
    if not 1 <= num_samples <= MAX_SAMPLES:
        raise InvalidRequest(f"num_samples is {num_samples}, expected 1 to {MAX_SAMPLES}")
    stops = _stops_on_commit(m.version)
    stream = m.stream
    per_event = stream.min_tokens_per_event if stream.HasField("min_tokens_per_event") else DEFAULT_MIN_TOKENS_PER_EVENT
    return GenerationRequest(
        request_id=m.request_id,
        identity=_identity(m),
        prompt_token_ids=np.frombuffer(m.prompt_token_ids, wire.TOKEN_DTYPE),
        prompt_digest=content_digest(m.prompt_token_ids),
        sampling=wire.sampling_from_pb(m.sampling),
        mode=logprob_mode(m.logprobs),
        num_samples=num_samples,
        policy_id=m.policy_id,
        min_weight_version=m.version.min_weight_version,
        stops_on_commit=stops,
        cache_bypass=m.cache.bypass,
        cache_salt=m.cache.salt,
        final_only=stream.final_only,
        min_tokens_per_event=max(per_event, 1),
        max_event_delay_s=seconds(stream, "max_event_delay", DEFAULT_MAX_EVENT_DELAY_S),
        heartbeat_s=max(seconds(stream, "heartbeat", DEFAULT_HEARTBEAT_S), MIN_HEARTBEAT_S),
        detach_grace_s=seconds(m, "detach_grace", 0.0),
        top_logprobs=m.logprobs.top_k,
        prompt_last_n=m.logprobs.prompt_last_n,
        priority=m.priority,
        extras=_extras(m),
        backend_options=_backend_options(m),
    )


def _backend_options(m: pb.GenerateRequest) -> dict[str, Any]:
    try:
        return json_format.MessageToDict(m.backend_options)
    except (json_format.Error, ValueError) as error:
        raise InvalidRequest(f"backend_options cannot be read as JSON: {error}") from None


def scoring_request(m: pb.ScoreRequest) -> ScoringRequest:
    """Raises InvalidRequest for malformed fields."""
    if len(m.token_ids) % wire.TOKEN_DTYPE.itemsize:
        raise InvalidRequest(f"token_ids has {len(m.token_ids)} bytes, expected a multiple of 4 (int32)")
    if len(m.request_id) > MAX_ID_CHARACTERS:
        raise InvalidRequest(f"request_id has {len(m.request_id)} characters, expected at most {MAX_ID_CHARACTERS}")
    if m.logprobs.prompt_last_n:
        raise InvalidRequest("logprobs.prompt_last_n belongs to Generate: Score says with score_from what it scores")
    _stops_on_commit(m.version)
    return ScoringRequest(
        request_id=m.request_id,
        token_ids=np.frombuffer(m.token_ids, wire.TOKEN_DTYPE),
        score_from=m.score_from,
        mode=logprob_mode(m.logprobs),
        temperature=m.temperature if m.HasField("temperature") else 1.0,
        top_logprobs=m.logprobs.top_k,
        policy_id=m.policy_id,
        min_weight_version=m.version.min_weight_version,
    )


def score_response(chunk: ScoreChunk) -> pb.ScoreResponse:
    """One stream message."""
    m = pb.ScoreResponse(
        offset=chunk.offset,
        logprobs=np.ascontiguousarray(chunk.logprobs, wire.LOGPROB_DTYPE).tobytes(),
        weight_version=chunk.weight_version,
    )
    if chunk.top is not None:
        m.top.CopyFrom(wire.top_to_pb(chunk.top))
    m.crc32c = wire.crc32c_of(m)
    return m


def _stops_on_commit(policy: pb.VersionPolicy) -> bool:
    return bool(known(policy.on_commit, ON_COMMIT_NAMES, "version.on_commit", unset="continue") == "stop")


def logprob_mode(options: pb.LogprobOptions) -> LogprobMode:
    """Raises InvalidRequest for a mode that this server does not know."""
    return known(options.mode, {x.value: x for x in LogprobMode}, "logprobs.mode", unset=LogprobMode.SAMPLING)


def _extras(m: pb.GenerateRequest) -> tuple[str, ...]:
    return tuple(dict.fromkeys(known(e, EXTRA_NAMES, "extras", unset=None) for e in m.extras))


def _identity(m: pb.GenerateRequest) -> bytes:
    same = pb.GenerateRequest()
    same.CopyFrom(m)
    same.ClearField("resume_after")
    return content_digest(same.SerializeToString(deterministic=True))


def generate_response(seq: int, event: events.Event | events.Heartbeat) -> pb.GenerateResponse:
    """One stream message."""
    if isinstance(event, events.TokenDelta):
        return pb.GenerateResponse(seq=seq, delta=_token_delta(event))
    if isinstance(event, events.SampleFinished):
        return pb.GenerateResponse(seq=seq, sample_finished=_sample_finished(event))
    if isinstance(event, events.Heartbeat):
        beat = pb.Heartbeat(phase=number(event.phase), tokens_so_far=event.tokens_so_far)
        return pb.GenerateResponse(seq=seq, heartbeat=beat)
    started = pb.Started(
        instance_id=event.instance_id,
        weight_version=event.weight_version,
        effective=wire.sampling_to_pb(event.effective),
        mode=number(event.mode),
        prompt_token_digest=event.prompt_token_digest,
        cached_prompt_tokens=event.cached_prompt_tokens,
        prompt_logprobs=event.prompt_logprobs,
    )
    started.crc32c = wire.crc32c_of(started)
    return pb.GenerateResponse(seq=seq, started=started)


def _token_delta(event: events.TokenDelta) -> pb.TokenDelta:
    delta = pb.TokenDelta(
        sample_index=event.sample_index,
        offset=event.offset,
        token_ids=event.token_ids,
        logprobs=event.logprobs,
        weight_version=event.weight_version,
        oldest_kv_version=event.oldest_kv_version,
    )
    if event.top is not None:
        delta.top.CopyFrom(wire.top_to_pb(event.top))
    for name, array in event.extras.items():
        delta.extras[name].CopyFrom(wire.tensor_to_pb(array))
    delta.crc32c = wire.crc32c_of(delta)
    return delta


def _sample_finished(event: events.SampleFinished) -> pb.SampleFinished:
    m = pb.SampleFinished(
        sample_index=event.sample_index,
        reason=number(event.reason),
        num_tokens=event.num_tokens,
        token_digest=event.token_digest,
        invalid_logprobs=event.invalid_logprobs,
        num_preemptions=event.num_preemptions,
    )
    for span in event.spans:
        m.spans.add(
            start=span.start,
            length=span.length,
            weight_version=span.weight_version,
            oldest_kv_version=span.oldest_kv_version,
        )
    if isinstance(event.stop_match, str):
        m.stop_string = event.stop_match
    elif event.stop_match is not None:
        m.stop_token_id = event.stop_match
    return m
