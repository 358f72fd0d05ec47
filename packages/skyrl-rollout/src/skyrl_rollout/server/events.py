"""What one run tells its readers, event by event, before a sequence number is put on it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from skyrl_rollout.tokens import FinishReason, LogprobMode, Sampling, TopK, VersionSpan


class WorkPhase(enum.IntEnum):
    """What a request is doing; the values are those of the protocol."""

    QUEUED = 1
    RUNNING = 2
    PAUSED = 3


class Started(NamedTuple):
    """The request was admitted. `effective` has every default filled in; `prompt_token_digest` is xxh3-128.

    prompt_logprobs: float32 LE of the last prompt tokens, empty where none were asked for.
    """

    instance_id: str
    weight_version: int
    effective: Sampling
    mode: LogprobMode
    prompt_token_digest: bytes
    cached_prompt_tokens: int = 0
    prompt_logprobs: bytes = b""

    @property
    def nbytes(self) -> int:
        return len(self.prompt_logprobs)


class TokenDelta(NamedTuple):
    """Tokens of one sample, all of one version. token_ids: int32 LE [n]. logprobs: float32 LE [n]. top and extras: what
    was asked for beside them, with n rows."""

    sample_index: int
    offset: int
    token_ids: bytes
    logprobs: bytes
    weight_version: int
    oldest_kv_version: int
    top: TopK | None = None
    extras: Mapping[str, np.ndarray] = {}

    @property
    def nbytes(self) -> int:
        beside = sum(array.nbytes for array in self.extras.values())
        if self.top is not None:
            beside += self.top.token_ids.nbytes + self.top.logprobs.nbytes
        return len(self.token_ids) + len(self.logprobs) + beside


class SampleFinished(NamedTuple):
    """A sample ended. `token_digest` is xxh3-128 over all its token ids."""

    sample_index: int
    reason: FinishReason
    num_tokens: int
    token_digest: bytes
    spans: tuple[VersionSpan, ...]
    invalid_logprobs: int
    num_preemptions: int
    stop_match: int | str | None

    @property
    def nbytes(self) -> int:
        return 0


class Heartbeat(NamedTuple):
    """Still alive; never logged, never replayed."""

    phase: WorkPhase
    tokens_so_far: int


Event = Started | TokenDelta | SampleFinished
