"""What an inference engine must provide so that the server kit can speak the protocol for it.

The kit owns everything that is the same for all engines: request ids, replay, coalescing, heartbeats, deadlines,
leases, fencing, staging, digests, version spans and health. An engine only generates, pauses, swaps weights and
reports load. Refusals that depend on the engine (a logprob mode it cannot compute, a stop string) are `ValueError` or
`errors.RolloutError` from `check`. What only some engines do stands in `PlainEngine`, whose refusals an engine
overrides together with the capability; the kit calls nothing that is not offered.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from skyrl_rollout.errors import MissingCapability
from skyrl_rollout.tokens import FinishReason, LogprobMode, Sampling, TopK
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
    max_top_logprobs: int = 0  # 0: none
    prompt_logprobs: bool = False
    cached_prompt_tokens: bool = False  # whether PromptRead tells how many prompt tokens came from the cache
    score: bool = False
    priority: bool = False
    extras: tuple[str, ...] = ()  # of "routed_experts", "top_p_token_ids"
    backend_options: tuple[str, ...] = ()
    reset_cache: bool = False
    sleep_levels: tuple[str, ...] = ()  # of "offload", "discard"
    lora: bool = False
    max_adapters: int = 0  # that fit at the same time, 0: any number; the kit drops one before it loads one too many
    collectives: tuple[str, ...] = ()  # transports that bring bytes straight to the engine: "nccl", "cuda_ipc", "gloo"


@dataclass(frozen=True)
class EngineRequest:
    """One admitted generation; `sampling` has every default filled in, `max_tokens` included."""

    request_id: str
    prompt_token_ids: np.ndarray  # int32 [P]
    sampling: Sampling
    mode: LogprobMode
    num_samples: int
    cache_salt: str  # names (policy, weight version, caller's salt): KV of another salt must not be used
    policy_id: str = ""  # "" is the base policy, else an adapter that was loaded
    top_logprobs: int = 0  # how many of the most probable tokens to report per position, in the mode asked for
    prompt_last_n: int = 0  # how many of the last prompt tokens need a logprob
    priority: int = 0  # higher is sooner
    extras: tuple[str, ...] = ()
    backend_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptRead:
    """Yielded once, before any token, where the engine offers prompt logprobs or cached prompt tokens.

    logprobs: float32 [prompt_last_n], NaN for the first token of the prompt, which nothing precedes.
    """

    cached_tokens: int = 0
    logprobs: np.ndarray | None = None


@dataclass(frozen=True)
class TokensMade:
    """New tokens of one sample, in order, none skipped. token_ids int32 [k], logprobs float32 [k]. top: of every token
    or of none. extras: name -> array whose first axis is k, every one that was asked for: "routed_experts" int16
    [k, layers, experts per token]; "top_p_token_ids" int32 [k, w], the candidates best first, short rows filled with
    -1, where w may differ from one TokensMade to the next."""

    sample_index: int
    token_ids: np.ndarray
    logprobs: np.ndarray
    top: TopK | None = None
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class SampleEnded:
    """A sample is complete; no more tokens follow for this index."""

    sample_index: int
    reason: FinishReason
    stop_match: int | str | None = None
    num_preemptions: int = 0


@dataclass(frozen=True)
class EngineScoreRequest:
    """Logprobs wanted for token_ids[score_from:], each given all tokens before it; score_from is at least 1."""

    request_id: str
    token_ids: np.ndarray  # int32 [S]
    score_from: int
    mode: LogprobMode
    temperature: float
    top_logprobs: int
    cache_salt: str
    policy_id: str = ""


@dataclass(frozen=True)
class TokensScored:
    """The next positions of a score request, in order: logprobs float32 [k], NaN where unknown."""

    logprobs: np.ndarray
    top: TopK | None = None


@dataclass(frozen=True)
class Adapter:
    """A low-rank adapter: weights are W + (alpha / rank) * B @ A for every target module."""

    policy_id: str
    version: int
    rank: int
    alpha: float
    target_modules: tuple[str, ...]


@dataclass(frozen=True)
class CollectiveTransfer:
    """How the engine meets the trainer: backend "nccl", "cuda_ipc" or "gloo". handles: what a "cuda_ipc" trainer sent,
    tensor name -> (device UUID, raw handle bytes, offset)."""

    backend: str
    master_addr: str = ""
    master_port: int = 0
    world_size: int = 0
    rank_offset: int = 0
    handles: Mapping[str, tuple[str, bytes, int]] = field(default_factory=dict)


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

    def generate(self, request: EngineRequest) -> AsyncGenerator[PromptRead | TokensMade | SampleEnded]:
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

    def extra_nbytes(self, nbytes: int) -> int:
        """Bytes of host memory that `load_weights` or `load_adapter` of `nbytes` takes beyond what the engine holds:
        an update for which there is no room is refused before any byte moves."""

    async def load_weights(self, tensors: Iterator[tuple[TensorLayout, memoryview]]) -> None:
        """Swaps the live weights; called only while paused. Raises if the model is now unusable (the kit then reports
        POISONED)."""

    def load(self) -> EngineLoad: ...

    async def close(self) -> None:
        """Frees everything, child processes included."""

    def check_score(self, request: EngineScoreRequest) -> None:
        """Capability `score`. Raises ValueError for a mode or temperature that cannot be computed exactly."""

    def score(self, request: EngineScoreRequest) -> AsyncGenerator[TokensScored]:
        """Capability `score`. Streams logprobs of every position from score_from on; closing the iterator ends it."""

    async def reset_cache(self, *, preempt_running: bool) -> int:
        """Capability `reset_cache`. Drops cached KV and returns how many blocks that freed; with preempt_running also
        that of running requests, which is then computed again. Raises errors.WrongState where blocks are held."""

    async def sleep(self, level: str) -> int:
        """Capability `sleep_levels`. Called while paused, with nothing running. "offload" keeps the weights in host
        memory, "discard" drops them. Returns the accelerator bytes that were freed."""

    async def wake_up(self, *, weights: bool, kv_cache: bool) -> None:
        """Capability `sleep_levels`. Takes the memory back; after "discard" the weights are undefined until the next
        `load_weights`."""

    def check_adapter(self, adapter: Adapter, tensors: Sequence[TensorLayout]) -> None:
        """Capability `lora`. Raises ValueError for a rank, module or tensor that this model cannot take. Tensors are
        named as PEFT saves them: "base_model.model.<module>.lora_A.weight" and "...lora_B.weight"."""

    async def load_adapter(self, adapter: Adapter, tensors: Iterator[tuple[TensorLayout, memoryview]]) -> None:
        """Capability `lora`. Called only while paused: from now on requests of adapter.policy_id, running ones
        included, use these weights. Raises if that policy is now unusable."""

    async def drop_adapter(self, policy_id: str) -> None:
        """Capability `lora`. Forgets an adapter that no request uses. Unknown id: no-op."""

    async def join(self, transfer: CollectiveTransfer, tensors: Sequence[TensorLayout]) -> None:
        """Capability `collectives`. Gets ready for `tensors`, in this order; returns when the trainer may enter."""

    async def receive(self) -> None:
        """Capability `collectives`. Called only while paused, after `join`: the bytes go straight into the live
        weights. Raises if the model is now unusable."""

    async def leave(self) -> None:
        """Capability `collectives`. Ends what `join` began, whether or not anything was received."""


class PlainEngine:
    """What an engine inherits: it loads without memory of its own, and the kit never calls the operations that it does
    not offer."""

    def extra_nbytes(self, nbytes: int) -> int:
        return 0

    def check_score(self, request: EngineScoreRequest) -> None:
        raise MissingCapability.named("score", "Score")

    def score(self, request: EngineScoreRequest) -> AsyncGenerator[TokensScored]:
        raise MissingCapability.named("score", "Score")

    async def reset_cache(self, *, preempt_running: bool) -> int:
        raise MissingCapability.named("reset_cache", "ResetCache")

    async def sleep(self, level: str) -> int:
        raise MissingCapability.named("sleep", "Sleep")

    async def wake_up(self, *, weights: bool, kv_cache: bool) -> None:
        raise MissingCapability.named("sleep", "WakeUp")

    def check_adapter(self, adapter: Adapter, tensors: Sequence[TensorLayout]) -> None:
        raise MissingCapability.named("lora", "updating an adapter")

    async def load_adapter(self, adapter: Adapter, tensors: Iterator[tuple[TensorLayout, memoryview]]) -> None:
        raise MissingCapability.named("lora", "updating an adapter")

    async def drop_adapter(self, policy_id: str) -> None:
        raise MissingCapability.named("lora", "dropping an adapter")

    async def join(self, transfer: CollectiveTransfer, tensors: Sequence[TensorLayout]) -> None:
        raise MissingCapability.named("transports", f"the transport {transfer.backend!r}")

    async def receive(self) -> None:
        raise MissingCapability.named("transports", "a collective transport")

    async def leave(self) -> None:
        raise MissingCapability.named("transports", "a collective transport")
