"""One request inside the engine: its samples, or the sequence to score, and what was made and not handed over."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from skyrl_rollout.server.engine import (
    EngineRequest,
    EngineScoreRequest,
    PromptRead,
    SampleEnded,
    TokensMade,
    TokensScored,
    TopK,
)
from skyrl_rollout.tokens import FinishReason

from skyrl.serve.sampling import DrawnRow, reported_scale
from skyrl.serve.stop_strings import StopStrings

Item = PromptRead | TokensMade | SampleEnded | TokensScored
Top = tuple[np.ndarray, np.ndarray] | None
_arrivals = itertools.count()


class Work:
    """The rows of one request. `hand_over` takes what they made; it is called on the engine's thread."""

    def __init__(self, request_id: str, hand_over: Callable[[Item], None]) -> None:
        self.request_id = request_id
        self.hand_over = hand_over
        self.rows: list[Row] = []
        self.is_prompt_read = False

    @classmethod
    def generating(cls, request: EngineRequest, tokenizer: Any, hand_over: Callable[[Item], None]) -> Work:
        """One row per sample."""
        work = cls(request.request_id, hand_over)
        work.rows = [Sample(work, request, i, tokenizer) for i in range(request.num_samples)]
        return work

    @classmethod
    def scoring(cls, request: EngineScoreRequest, hand_over: Callable[[Item], None]) -> Work:
        """One row, which makes no token."""
        work = cls(request.request_id, hand_over)
        work.rows = [Scored(work, request)]
        return work


class Row:
    """A sequence of ids, of which `kv_len` are in the cache. `read_from` to `read_to`: ids whose logprobs are wanted.

    feed_to: how many ids are to be in the cache before something new happens.
    """

    policy_id: str
    salt: str
    priority = 0
    top = 0

    def __init__(self, work: Work, token_ids: np.ndarray, *, read_from: int, read_to: int, scale: float) -> None:
        self.work = work
        self.arrival = next(_arrivals)
        self.ids: list[int] = token_ids.tolist()
        self.kv_len = 0
        self.cached: int | None = None  # prompt tokens that were found in the cache when the row was first admitted
        self.ended = False
        self.num_preemptions = 0
        self.read_from, self.read_to, self.scale = read_from, read_to, scale

    @property
    def order(self) -> tuple[int, int]:
        """Who comes first."""
        return (-self.priority, self.arrival)

    @property
    def feed_to(self) -> int:
        return len(self.ids)

    @property
    def pending(self) -> int:
        """How many ids the model has still to see."""
        return self.feed_to - self.kv_len

    @property
    def reads(self) -> bool:
        return self.read_from < self.read_to

    def reads_within(self, most: int) -> bool:
        """Whether its next call, of at most so many ids, is one whose logits are read."""
        return self.reads and (self.pending <= most or self.read_from - 1 <= self.kv_len)

    def next_ids(self, most: int, *, reads: bool) -> int:
        """How many ids that call sees; one that reads nothing stops where reading begins."""
        end = self.feed_to if reads or not self.reads else self.read_from - 1
        return min(end - self.kv_len, most)

    def forget_kv(self) -> None:
        """Everything is computed again."""
        self.kv_len = 0

    def take_read(self, logprobs: np.ndarray, tops: list[Top]) -> None:
        """Logprobs of the ids from `read_from` on."""
        raise NotImplementedError

    def end(self, reason: FinishReason) -> None:
        """Ends it from outside."""
        raise NotImplementedError


class Sample(Row):
    """One sample of a generation, its own random stream, and tokens made but not handed over."""

    def __init__(self, work: Work, request: EngineRequest, index: int, tokenizer: Any) -> None:
        s, prompt = request.sampling, request.prompt_token_ids
        wanted = request.prompt_last_n if index == 0 else 0
        first = max(len(prompt) - wanted, 1)
        scale = reported_scale(request.mode, s.temperature)
        super().__init__(work, prompt, read_from=first, read_to=len(prompt) if wanted else first, scale=scale)
        self.policy_id, self.salt, self.priority = request.policy_id, request.cache_salt, request.priority
        self.index, self.sampling, self.mode, self.prompt = index, s, request.mode, prompt
        self.seed = ((s.seed or 0) + index) % 2**64
        self.output: list[int] = []
        self._first, self._read = first, np.full(wanted, np.nan, np.float32)
        self._stops, self._limit = frozenset(s.stop_token_ids), s.max_tokens or 0
        self._strings = StopStrings(tokenizer, s.stop_strings) if s.stop_strings else None
        self._sent, self._logprobs = 0, list[float]()
        self._num_top, self._tops = request.top_logprobs, list[Top]()

    def asked(self, u: float, eos: tuple[int, ...]) -> DrawnRow:
        """What the next draw is for."""
        s, may_end = self.sampling, len(self.output) >= self.sampling.min_tokens
        forbidden = () if may_end else (*self._stops, *(() if s.ignore_eos else eos))
        return DrawnRow(s, self.mode, u, self.prompt, self.output, forbidden, self._num_top)

    def append(self, token: int, logprob: float, top: Top, eos: tuple[int, ...]) -> None:
        """Takes the next token, and ends where it ends the sample. Stop strings wait for `min_tokens`."""
        self.ids.append(token)
        self.output.append(token)
        self._logprobs.append(logprob)
        if self._num_top:
            self._tops.append(top)
        may_end = len(self.output) >= self.sampling.min_tokens
        text = self._strings.match(token, may_end=may_end) if self._strings else None
        if token in self._stops:
            self.end(FinishReason.STOP_TOKEN, token)
        elif token in eos and not self.sampling.ignore_eos:
            self.end(FinishReason.EOS)
        elif text is not None:
            self.end(FinishReason.STOP_STRING, text)
        elif len(self.output) >= self._limit:
            self.end(FinishReason.LENGTH)

    def take_read(self, logprobs: np.ndarray, tops: list[Top]) -> None:
        start = self.read_from - (len(self.prompt) - len(self._read))
        self._read[start : start + len(logprobs)] = logprobs
        self.read_from += len(logprobs)

    def say_prompt_is_read(self) -> None:
        """Once, before the first token of the request."""
        if not self.work.is_prompt_read:
            self.work.is_prompt_read = True
            self.work.hand_over(PromptRead(self.cached or 0, self._read if len(self._read) else None))

    def forget_kv(self) -> None:
        self.kv_len = 0
        if self.reads:  # half read: logprobs of one prompt are of one version
            self.read_from = self._first

    def end(self, reason: FinishReason, stop_match: int | str | None = None) -> None:
        if not self.ended:
            self.ended = True
            self.flush()
            self.work.hand_over(SampleEnded(self.index, reason, stop_match, self.num_preemptions))

    def flush(self) -> None:
        """Hands over what was made."""
        if self._sent == len(self.output):
            return
        ids, logprobs = np.array(self.output[self._sent :], np.int32), np.array(self._logprobs, np.float32)
        top = _stacked(self._tops)
        self._sent, self._logprobs, self._tops = len(self.output), [], []
        self.work.hand_over(TokensMade(self.index, ids, logprobs, top))


class Scored(Row):
    """A sequence whose logprobs are wanted; its last id need not be seen."""

    def __init__(self, work: Work, request: EngineScoreRequest) -> None:
        scale = reported_scale(request.mode, request.temperature)
        ids = request.token_ids
        super().__init__(work, ids, read_from=request.score_from, read_to=len(ids), scale=scale)
        self.policy_id, self.salt, self.top = request.policy_id, request.cache_salt, request.top_logprobs

    @property
    def feed_to(self) -> int:
        return len(self.ids) - 1

    def take_read(self, logprobs: np.ndarray, tops: list[Top]) -> None:
        self.read_from += len(logprobs)
        self.work.hand_over(TokensScored(logprobs, _stacked(tops) if self.top else None))
        self.ended = not self.reads

    def end(self, reason: FinishReason) -> None:
        self.ended = True


def _stacked(tops: list[Top]) -> TopK | None:
    given = [top for top in tops if top is not None]
    return TopK(np.stack([ids for ids, _ in given]), np.stack([values for _, values in given])) if given else None
