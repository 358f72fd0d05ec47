"""What may be asked for with a generation beside its prompt and sampling, and the message that asks for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from skyrl_rollout import wire
from skyrl_rollout.errors import MissingCapability
from skyrl_rollout.server_info import ServerInfo
from skyrl_rollout.tokens import LogprobMode, Sampling
from skyrl_rollout.v1 import generation_pb2

DETACH_GRACE_S = 60.0
TOKENS_PER_EVENT = 64
_ON_COMMIT = {
    "continue": generation_pb2.VersionPolicy.ON_COMMIT_CONTINUE,
    "stop": generation_pb2.VersionPolicy.ON_COMMIT_STOP,
}


@dataclass(frozen=True)
class GenerateOptions:
    """How one generation is served and sent.

    policy_id: "" is the base policy. min_weight_version: waits until it is committed. on_commit: "continue" under new
    weights, or "stop" there. top_logprobs: of how many most probable tokens per position. prompt_last_n: of how many of
    the last prompt tokens a logprob is wanted. extras: "routed_experts", "top_p_token_ids". priority: higher is sooner.
    cache_salt: KV is shared only under one salt; bypass_cache: not at all. session_id: a hint for whoever routes.

    detach_grace_s: how long the server keeps working while the connection is broken; 0: a break is an error.
    unreachable_s: how long the server may stay away (default: until the timeout). restarts: whether the run begins anew
    where the server was replaced, else that is ServerReplaced. A delta comes every `tokens_per_event` tokens, or after
    `max_event_delay_s` (unset: the server's default) where there are fewer; final_only: at the end of each sample.
    """

    num_samples: int = 1
    policy_id: str = ""
    min_weight_version: int | None = None
    on_commit: str = "continue"
    top_logprobs: int = 0
    prompt_last_n: int = 0
    extras: tuple[str, ...] = ()
    priority: int = 0
    backend_options: Mapping[str, Any] = field(default_factory=dict)
    cache_salt: str = ""
    bypass_cache: bool = False
    session_id: str = ""
    detach_grace_s: float = DETACH_GRACE_S
    unreachable_s: float | None = None
    restarts: bool = True
    tokens_per_event: int = TOKENS_PER_EVENT
    max_event_delay_s: float | None = None
    final_only: bool = False

    def __post_init__(self) -> None:
        if self.on_commit not in _ON_COMMIT:
            raise ValueError(f"on_commit is one of {sorted(_ON_COMMIT)}, not {self.on_commit!r}")
        if self.num_samples < 1:
            raise ValueError(f"num_samples is at least 1, not {self.num_samples}")
        for name in ("top_logprobs", "prompt_last_n"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is at least 0, not {getattr(self, name)}")
        if unknown := [extra for extra in self.extras if extra not in wire.EXTRAS]:
            raise ValueError(f"extras are some of {sorted(wire.EXTRAS)}, not {unknown[0]!r}")


def check_offered(info: ServerInfo, sampling: Sampling, mode: LogprobMode, options: GenerateOptions) -> None:
    """Raises MissingCapability for what this server lacks, before anything is sent: it would ignore what is newer than
    itself."""
    need = info.capabilities.need
    need("logprob_modes", f"logprob mode {mode.name}", among=mode)
    if sampling.stop_strings:
        need("stop_strings", f"stopping at {list(sampling.stop_strings)}")
    if options.prompt_last_n:
        need("prompt_logprobs", "returning prompt logprobs")
    if options.priority:
        need("priority", "a request before others")
    for extra in options.extras:
        need("extras", f"the extra output {extra!r}", among=extra)
    for name in options.backend_options:
        need("backend_options", f"the option {name!r}", among=name)
    check_top(info, options.top_logprobs)


def check_top(info: ServerInfo, top_logprobs: int) -> None:
    """Raises MissingCapability where the server returns no top logprobs."""
    if top_logprobs and not info.limits.max_top_logprobs:
        raise MissingCapability.named("max_top_logprobs", "returning the top logprobs of other tokens")


def generate_request(
    prompt_token_ids: Sequence[int] | np.ndarray,
    sampling: Sampling,
    mode: LogprobMode,
    options: GenerateOptions,
    *,
    request_id: str,
    heartbeat_s: float,
) -> generation_pb2.GenerateRequest:
    """Every value is sent, defaults included. Raises ValueError for token ids or backend options that do not travel."""
    stream = generation_pb2.StreamOptions(final_only=options.final_only, min_tokens_per_event=options.tokens_per_event)
    stream.heartbeat.FromNanoseconds(int(heartbeat_s * 1e9))
    if options.max_event_delay_s is not None:
        stream.max_event_delay.FromNanoseconds(int(options.max_event_delay_s * 1e9))
    request = generation_pb2.GenerateRequest(
        request_id=request_id,
        prompt_token_ids=wire.token_bytes(prompt_token_ids),
        sampling=wire.sampling_to_pb(sampling),
        logprobs=generation_pb2.LogprobOptions(
            mode=wire.LOGPROB_MODES[mode], top_k=options.top_logprobs, prompt_last_n=options.prompt_last_n
        ),
        num_samples=options.num_samples,
        policy_id=options.policy_id,
        version=version_policy(options.min_weight_version, options.on_commit),
        cache=generation_pb2.CacheOptions(bypass=options.bypass_cache, salt=options.cache_salt),
        session_id=options.session_id,
        priority=options.priority,
        stream=stream,
        extras=[wire.EXTRAS[extra] for extra in options.extras],
    )
    if options.backend_options:
        request.backend_options.update(options.backend_options)
    if options.detach_grace_s > 0:
        request.detach_grace.FromNanoseconds(int(options.detach_grace_s * 1e9))
    return request


def version_policy(min_weight_version: int | None, on_commit: str = "continue") -> generation_pb2.VersionPolicy:
    """Which weights may serve a request."""
    return generation_pb2.VersionPolicy(min_weight_version=min_weight_version, on_commit=_ON_COMMIT[on_commit])
