"""What a caller asked for, with every default filled in, and the checks that hold for any engine."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, replace

import numpy as np

from skyrl_rollout.errors import InvalidRequest, MissingCapability, UnknownPolicy
from skyrl_rollout.server.engine import EngineCapabilities, EngineRequest, ModelIdentity
from skyrl_rollout.tokens import LogprobMode, Sampling

SEED_LIMIT = 1 << 62  # leaves room for seed + sample index in every engine's signed 64 bits


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


def complete(request: GenerationRequest, model: ModelIdentity, offers: EngineCapabilities) -> GenerationRequest:
    """The request with `max_tokens` and `seed` filled in. Raises InvalidRequest, MissingCapability or UnknownPolicy."""
    if request.policy_id:
        raise UnknownPolicy(f"policy {request.policy_id!r} is not loaded: leave policy_id empty for the base policy")
    prompt = request.prompt_token_ids
    if not len(prompt):
        raise InvalidRequest("prompt_token_ids is empty: send at least one token")
    if int(prompt.min()) < 0 or int(prompt.max()) >= model.vocab_size:
        raise InvalidRequest(f"prompt_token_ids must lie in [0, {model.vocab_size}), the model's vocabulary")
    room = model.max_context - len(prompt)
    if room < 1:
        raise InvalidRequest(f"the prompt has {len(prompt)} tokens and the context is {model.max_context}: shorten it")
    if request.mode not in offers.logprob_modes:
        names = ", ".join(m.name for m in offers.logprob_modes)
        raise InvalidRequest(f"logprob mode {request.mode.name} cannot be computed here: this server has {names}")
    if request.sampling.stop_strings and not offers.stop_strings:
        raise MissingCapability.named("stop_strings", "stopping at a string")
    sampling = request.sampling
    max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    seed = secrets.randbelow(SEED_LIMIT) if sampling.seed is None else sampling.seed
    sampling = replace(sampling, max_tokens=max_tokens, seed=seed)
    violations = sampling_violations(sampling, model.vocab_size)
    if violations:
        raise InvalidRequest("; ".join(f"{f}: {d}" for f, d in violations), violations=violations)
    return replace(request, sampling=sampling)


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


def engine_request(request: GenerationRequest, weight_version: int) -> EngineRequest:
    """What the engine is given. KV is keyed by (policy, version, the caller's salt); bypass makes the key unique."""
    salt = f"{request.policy_id}@{weight_version}:{request.cache_salt}"
    if request.cache_bypass:
        salt += f":{request.request_id}"
    return EngineRequest(
        request.request_id, request.prompt_token_ids, request.sampling, request.mode, request.num_samples, salt
    )
