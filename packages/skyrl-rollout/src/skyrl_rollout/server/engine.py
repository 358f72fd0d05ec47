"""What an inference engine must provide so that the server kit can speak the protocol for it.

The kit owns everything that is the same for all engines: request ids, replay, coalescing, heartbeats, deadlines,
leases, fencing, staging, digests, version spans and health. An engine only generates, pauses, swaps weights and
reports load. Refusals that depend on the engine (a logprob mode it cannot compute, a stop string) are `ValueError` or
`errors.RolloutError` from `check`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from skyrl_rollout.tokens import FinishReason, LogprobMode, Sampling
from skyrl_rollout.weights.manifest import TensorLayout


@dataclass(frozen=True)
class ModelIdentity:
    """The served model. `tensors` is the layout that every full update must match, in canonical order."""

    name: str
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    dtype: str  # "f32", "bf16", ...: the dtype in which weights are taken
    tensors: tuple[TensorLayout, ...]
    tokenizer_digest: str = ""


@dataclass(frozen=True)
class EngineCapabilities:
    """What the engine itself can do; the kit adds what it provides (inline and shm transports, staging, replay)."""

    logprob_modes: tuple[LogprobMode, ...]
    pause_modes: tuple[str, ...]  # of "abort", "wait", "keep"
    kv_policies: tuple[str, ...]  # of "recompute", "retain"
    deterministic_seed: bool = False
    stop_strings: bool = False


@dataclass(frozen=True)
class EngineRequest:
    """One admitted generation; `sampling` has every default filled in, `max_tokens` included."""

    request_id: str
    prompt_token_ids: np.ndarray  # int32 [P]
    sampling: Sampling
    mode: LogprobMode
    num_samples: int
    cache_salt: str  # names (policy, weight version, caller's salt): KV of another salt must not be used


@dataclass(frozen=True)
class TokensMade:
    """New tokens of one sample, in order, none skipped. token_ids int32 [k], logprobs float32 [k]."""

    sample_index: int
    token_ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True)
class SampleEnded:
    """A sample is complete; no more tokens follow for this index."""

    sample_index: int
    reason: FinishReason
    stop_match: int | str | None = None
    num_preemptions: int = 0


@dataclass(frozen=True)
class EngineLoad:
    """running, waiting: samples. kv_usage: 0 to 1. step_counter grows with every engine step."""

    running: int
    waiting: int
    kv_usage: float
    step_counter: int


class Engine(Protocol):
    """An inference engine inside a rollout server. All methods run on the server's event loop and must not block it."""

    identity: ModelIdentity
    capabilities: EngineCapabilities

    def check(self, request: EngineRequest) -> None:
        """Raises ValueError, with what to change, for parameters that the engine cannot honour exactly."""

    def generate(self, request: EngineRequest) -> AsyncGenerator[TokensMade | SampleEnded]:
        """Streams the continuation; sample i draws with seed + i. Closing the iterator aborts the work and
        frees its slot and KV at once.

        While paused with "keep" the iterator may still yield tokens made before the pause, never newer ones.
        """

    async def abort(self, request_id: str) -> None:
        """Ends running samples with FinishReason.ABORTED; `generate` yields the SampleEnded. Unknown id: no-op."""

    async def pause(self, mode: str, *, clear_cache: bool) -> None:
        """Returns when no more tokens are produced. mode "abort" ends samples with FinishReason.PAUSED, "wait" lets
        them finish, "keep" freezes them. clear_cache drops all KV, so that frozen requests are recomputed on resume.

        The kit calls "wait" only when nothing runs. It may call again while paused: "abort" then ends what is frozen,
        and clear_cache drops the KV."""

    async def resume(self) -> None: ...

    def tokens_made(self) -> Mapping[str, list[int]]:
        """request_id -> tokens produced so far per sample, exact while paused, also where `generate` lags behind.

        A request is listed from its admission until its iterator has yielded the last SampleEnded; one that is not
        listed has made nothing beyond what its iterator has yielded."""

    async def load_weights(self, tensors: Iterator[tuple[TensorLayout, memoryview]]) -> None:
        """Swaps the live weights; called only while paused. Raises if the model is now unusable (the kit then reports
        POISONED)."""

    def load(self) -> EngineLoad: ...

    async def close(self) -> None:
        """Frees everything, child processes included."""
