"""What is asked of a rollout server and what comes back, as plain dataclasses and arrays.

Protobuf objects stop at the service files and at `client.py`; everything else in every package sees these types.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

GREEDY = 0.0


class LogprobMode(enum.IntEnum):
    """What a logprob means; the values are those of the protocol.

    RAW is log_softmax(logits). TEMPERATURE is log_softmax(logits / T) over the full vocabulary, which is what a trainer
    recomputes. SAMPLING is the distribution really drawn from, after penalties, top-k and top-p. Greedy (T = 0) answers
    log_softmax(logits) in all three.
    """

    RAW = 1
    TEMPERATURE = 2
    SAMPLING = 3


class FinishReason(enum.IntEnum):
    """Why a sample ended; the values are those of the protocol."""

    EOS = 1
    STOP_TOKEN = 2
    STOP_STRING = 3
    LENGTH = 4
    ABORTED = 5
    PAUSED = 6
    VERSION_CHANGED = 7

    @property
    def is_stop(self) -> bool:
        """Whether the model chose to end (what public recipes call stop_reason 'stop')."""
        return self in (FinishReason.EOS, FinishReason.STOP_TOKEN, FinishReason.STOP_STRING)


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters with the protocol's defaults. `max_tokens=None` means the context that is left."""

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    min_tokens: int = 0
    ignore_eos: bool = False
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == GREEDY

    @property
    def is_full_distribution(self) -> bool:
        """Whether tokens are drawn from softmax(logits / T) itself: no top-k, top-p, min-p, penalty or bias."""
        return (
            self.top_p == 1.0
            and self.top_k <= 0
            and self.min_p == 0.0
            and self.frequency_penalty == 0.0
            and self.presence_penalty == 0.0
            and self.repetition_penalty == 1.0
            and not self.logit_bias
        )


@dataclass(frozen=True)
class VersionSpan:
    """Tokens [start, start + length) were produced under `weight_version`."""

    start: int
    length: int
    weight_version: int
    oldest_kv_version: int


@dataclass(frozen=True)
class TopK:
    """The k most probable tokens of n positions, best first: token_ids int32 [n, k], logprobs float32 [n, k]."""

    token_ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True)
class Sample:
    """One finished continuation of a prompt.

    token_ids: int32 [n], the stop token included. logprobs: float32 [n], NaN where unknown. weight_versions: int64 [n],
    the committed version that produced each token. stop_match: the stop token id or stop string that ended it.
    instance_ids: the server processes that made it, in order; more than one where a server was lost on the way. top:
    the most probable tokens at each position, where asked for. extras: name -> array with one row per token, where
    asked for; rows of token ids that are shorter than others are filled with -1.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    weight_versions: np.ndarray
    finish_reason: FinishReason
    spans: tuple[VersionSpan, ...] = ()
    stop_match: int | str | None = None
    invalid_logprobs: int = 0
    num_preemptions: int = 0
    instance_ids: tuple[str, ...] = ()
    top: TopK | None = None
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Generation:
    """All samples of one request, in sample order, with what the server says it really did.

    num_restarts: how often a run started over because its server was lost; the tokens of the lost run are dropped.
    num_moves: how often a sample went on elsewhere with its tokens, num_kept_tokens of them in all. prompt_logprobs:
    float32 of the last prompt tokens, where asked for, NaN for the first token of the prompt.
    """

    request_id: str
    instance_id: str
    samples: tuple[Sample, ...]
    effective: Sampling
    mode: LogprobMode
    cached_prompt_tokens: int = 0
    num_restarts: int = 0
    num_moves: int = 0
    num_kept_tokens: int = 0
    prompt_logprobs: np.ndarray | None = None


@dataclass(frozen=True)
class Scores:
    """How probable given tokens are under one weight version: logprobs float32 [n] of token_ids[score_from:], NaN where
    unknown, and the most probable tokens at each position, where asked for."""

    logprobs: np.ndarray
    weight_version: int
    mode: LogprobMode
    top: TopK | None = None
