"""What a caller asked for, with every default filled in, and the checks that hold for any engine."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from skyrl_rollout.errors import InvalidRequest, MissingCapability
from skyrl_rollout.server.engine import EngineCapabilities, EngineRequest, ModelIdentity
from skyrl_rollout.server.options import ServerOptions
from skyrl_rollout.tokens import LogprobMode, Sampling

SEED_LIMIT = 1 << 62  # leaves room for seed + sample index in every engine's signed 64 bits
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARACTERS = 1024
TOP_LOGPROB_BYTES = 8  # an id and a logprob


@dataclass(frozen=True)
class GenerationRequest:
    """One Generate call. identity: digest of all its bytes but resume_after. Durations in seconds."""

    request_id: str
    identity: bytes
    prompt_token_ids: np.ndarray  # int32 [P]
    prompt_digest: bytes
    sampling: Sampling
    mode: LogprobMode
    num_samples: int
    policy_id: str
    min_weight_version: int
    stops_on_commit: bool
    cache_bypass: bool
    cache_salt: str
    final_only: bool
    min_tokens_per_event: int
    max_event_delay_s: float
    heartbeat_s: float
    detach_grace_s: float
    top_logprobs: int = 0
    prompt_last_n: int = 0
    priority: int = 0
    extras: tuple[str, ...] = ()
    backend_options: Mapping[str, Any] = field(default_factory=dict)


def complete(request: GenerationRequest, model: ModelIdentity, offers: EngineCapabilities) -> GenerationRequest:
    """The request with `max_tokens` and `seed` filled in. Raises InvalidRequest or MissingCapability."""
    prompt = request.prompt_token_ids
    check_tokens(prompt, "prompt_token_ids", model)
    room = model.max_context - len(prompt)
    if room < 1:
        raise InvalidRequest(f"the prompt has {len(prompt)} tokens and the context is {model.max_context}: shorten it")
    check_logprobs(request.mode, request.top_logprobs, model, offers)
    _check_offered(request, offers)
    sampling = request.sampling
    max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    seed = secrets.randbelow(SEED_LIMIT) if sampling.seed is None else sampling.seed
    sampling = replace(sampling, max_tokens=max_tokens, seed=seed)
    violations = sampling_violations(sampling, model.vocab_size)
    if violations:
        raise InvalidRequest("; ".join(f"{f}: {d}" for f, d in violations), violations=violations)
    return replace(request, sampling=sampling, prompt_last_n=min(request.prompt_last_n, len(prompt)))


def check_tokens(token_ids: np.ndarray, name: str, model: ModelIdentity) -> None:
    """Raises InvalidRequest for no tokens, or for one outside the vocabulary."""
    if not len(token_ids):
        raise InvalidRequest(f"{name} is empty: send at least one token")
    if int(token_ids.min()) < 0 or int(token_ids.max()) >= model.vocab_size:
        raise InvalidRequest(f"{name} must lie in [0, {model.vocab_size}), the model's vocabulary")


def check_logprobs(mode: LogprobMode, top: int, model: ModelIdentity, offers: EngineCapabilities) -> None:
    """Raises InvalidRequest for a mode that is not computed here or for more top logprobs than there can be."""
    if mode not in offers.logprob_modes:
        names = ", ".join(m.name for m in offers.logprob_modes)
        raise InvalidRequest(f"logprob mode {mode.name} cannot be computed here: this server has {names}")
    if top and not offers.max_top_logprobs:
        raise MissingCapability.named("max_top_logprobs", "returning the top logprobs of other tokens")
    most = min(offers.max_top_logprobs, model.vocab_size)
    if top > most:
        raise InvalidRequest(f"logprobs.top_k is {top}, the limit is {most}: see Limits.max_top_logprobs")


def _check_offered(request: GenerationRequest, offers: EngineCapabilities) -> None:
    if request.sampling.stop_strings and not offers.stop_strings:
        raise MissingCapability.named("stop_strings", "stopping at a string")
    if request.prompt_last_n and not offers.prompt_logprobs:
        raise MissingCapability.named("prompt_logprobs", "returning prompt logprobs")
    if request.priority and not offers.priority:
        raise MissingCapability.named("priority", "a request before others")
    for extra in request.extras:
        if extra not in offers.extras:
            raise MissingCapability.named("extras", f"the extra output {extra!r}")
    for option in sorted(request.backend_options):
        if option not in offers.backend_options:
            raise MissingCapability.named("backend_options", f"the option {option!r}")


def check_size(request: GenerationRequest, model: ModelIdentity, options: ServerOptions) -> None:
    """Raises InvalidRequest where what travels beside the tokens of a completed request could be too much."""
    s, row_bytes = request.sampling, TOP_LOGPROB_BYTES * request.top_logprobs
    if "top_p_token_ids" in request.extras:
        row_bytes += 4 * (min(s.top_k, model.vocab_size) if s.top_k > 0 else model.vocab_size)
    rows = (s.max_tokens or 0) * request.num_samples
    check_rows(row_bytes, rows, "lower logprobs.top_k, sampling.top_k, max_tokens or num_samples", options)


def check_rows(row_bytes: int, rows: int, remedy: str, options: ServerOptions) -> None:
    """Raises InvalidRequest where a row does not fit into a message, or all of them not into what the server keeps."""
    if row_bytes > options.max_message_bytes // 2:
        raise InvalidRequest(f"{row_bytes} bytes beside each token do not fit into a message: {remedy}")
    if row_bytes * rows > options.retained_bytes:
        raise InvalidRequest(
            f"{row_bytes} bytes beside each of {rows} tokens are more than the {options.retained_bytes} bytes that an "
            f"answer may have: {remedy}"
        )


def sampling_violations(s: Sampling, vocab_size: int) -> list[tuple[str, str]]:
    """(field, what is expected) for every value that no engine could honour."""
    rules = (
        ("max_tokens", s.max_tokens is None or s.max_tokens >= 1, "at least 1"),
        ("temperature", math.isfinite(s.temperature) and s.temperature >= 0, "finite and at least 0 (0 is greedy)"),
        ("top_p", 0 < s.top_p <= 1, "above 0 and at most 1"),
        ("top_k", s.top_k >= -1, "-1 for all tokens, or at least 1"),
        ("min_p", 0 <= s.min_p <= 1, "0 to 1"),
        ("min_tokens", s.max_tokens is None or s.min_tokens <= s.max_tokens, "at most max_tokens"),
        ("seed", s.seed is None or s.seed < 1 << 63, "below 2**63"),
        ("stop_token_ids", all(t < vocab_size for t in s.stop_token_ids), "inside the vocabulary"),
        ("stop_strings", _are_short(s.stop_strings), "at most 64, none empty, none above 1024 characters"),
        ("frequency_penalty", math.isfinite(s.frequency_penalty), "finite"),
        ("presence_penalty", math.isfinite(s.presence_penalty), "finite"),
        ("repetition_penalty", 0 < s.repetition_penalty < math.inf, "above 0 and finite"),
        ("logit_bias", all(t < vocab_size and math.isfinite(b) for t, b in s.logit_bias.items()), "known ids, finite"),
    )
    return [
        (f"sampling.{name}", f"is {getattr(s, name)}, expected {expected}")
        for name, holds, expected in rules
        if not holds
    ]


def _are_short(texts: tuple[str, ...]) -> bool:
    return len(texts) <= MAX_STOP_STRINGS and all(0 < len(t) <= MAX_STOP_STRING_CHARACTERS for t in texts)


def cache_key(policy_id: str, version: int, base_version: int, *more: str) -> str:
    """What KV is keyed by: policy, its version, the version of the base below it, and what the caller adds."""
    return json.dumps([policy_id, version, base_version, *more])


def engine_request(request: GenerationRequest, version: int, base_version: int) -> EngineRequest:
    """What the engine is given under a version of the request's policy; cache bypass makes the KV key unique."""
    own = (request.request_id,) if request.cache_bypass else ()
    return EngineRequest(
        request.request_id,
        request.prompt_token_ids,
        request.sampling,
        request.mode,
        request.num_samples,
        cache_key(request.policy_id, version, base_version, request.cache_salt, *own),
        request.policy_id,
        request.top_logprobs,
        request.prompt_last_n,
        request.priority,
        request.extras,
        request.backend_options,
    )
