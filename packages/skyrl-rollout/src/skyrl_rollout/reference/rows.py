"""One request inside the reference engine: its samples, what each has made and not handed over, and what ends it."""

from __future__ import annotations

from typing import Any

import numpy as np

from skyrl_rollout.reference.logits import CONTEXT, NO_TOKEN, mix
from skyrl_rollout.reference.sampling import Draw, draw_shaped, largest
from skyrl_rollout.server.engine import EngineRequest, SampleEnded, TokensMade, TopK
from skyrl_rollout.server.signals import Signal
from skyrl_rollout.tokens import FinishReason

LAYERS, EXPERTS_PER_TOKEN, NUM_EXPERTS = 2, 2, 8  # of the model that this engine stands in for
PAD = -1  # fills up the rows of token ids that are shorter than the longest


class Work:
    """The rows of one request, and what they made that was not read yet."""

    def __init__(self, request: EngineRequest, delay_s: float) -> None:
        """delay_s: between two tokens of a sample."""
        self.request_id = request.request_id
        self.items: list[TokensMade | SampleEnded] = []
        self.arrived = Signal()
        self.failure: Exception | None = None
        self.rows = [Row(self, request, i, delay_s) for i in range(request.num_samples)]

    def fail(self, error: Exception) -> None:
        self.failure = error
        self.arrived.fire()


class Row:
    """One sample: its last four tokens, its own random stream, and tokens made but not handed over."""

    def __init__(self, work: Work, request: EngineRequest, index: int, delay_s: float) -> None:
        s = request.sampling
        self.work, self.index, self.sampling, self.mode = work, index, s, request.mode
        self.policy_id, self.priority, self.delay_s = request.policy_id, request.priority, delay_s
        self.due_at = 0.0
        self.prompt = request.prompt_token_ids
        self.last = ([NO_TOKEN] * CONTEXT + self.prompt[-CONTEXT:].tolist())[-CONTEXT:]
        self.seed = ((s.seed or 0) + index) % 2**64
        self.temperature = s.temperature
        self.beside = Beside(request) if request.top_logprobs or request.extras else None
        self.is_shaped = not s.is_full_distribution or "top_p_token_ids" in request.extras
        self.output: list[int] = []
        self.ended: SampleEnded | None = None
        self.num_preemptions = 0
        self._stops = frozenset(s.stop_token_ids)
        self._limit = s.max_tokens or 0
        self._tail = ""
        self._tail_length = max(map(len, s.stop_strings), default=0)
        self._sent = 0
        self._logprobs: list[float] = []

    def forbidden(self, eos: tuple[int, ...]) -> tuple[int, ...]:
        """Tokens that would end the sample before `min_tokens`."""
        if len(self.output) >= self.sampling.min_tokens:
            return ()
        return (*self._stops, *(() if self.sampling.ignore_eos else eos))

    def draw(self, logits_V: np.ndarray, u: float, forbidden: tuple[int, ...]) -> Draw:
        return draw_shaped(
            logits_V, self.sampling, self.mode, u, prompt=self.prompt, output=self.output, forbidden=forbidden
        )

    def append(self, token: int, logprob: float) -> None:
        self.output.append(token)
        self._logprobs.append(logprob)
        self.last = [*self.last[1:], token]
        if self._tail_length:
            self._tail = (self._tail + text_of(token))[-self._tail_length :]

    def end_after(self, token: int, eos: tuple[int, ...]) -> SampleEnded | None:
        """The end of this sample, where `token`, its last, is one. Stop strings wait for `min_tokens`."""
        if token in self._stops:
            return SampleEnded(self.index, FinishReason.STOP_TOKEN, token)
        if token in eos and not self.sampling.ignore_eos:
            return SampleEnded(self.index, FinishReason.EOS)
        if self._tail_length and len(self.output) >= self.sampling.min_tokens:
            for text in self.sampling.stop_strings:
                if self._tail.endswith(text):
                    return SampleEnded(self.index, FinishReason.STOP_STRING, text)
        return SampleEnded(self.index, FinishReason.LENGTH) if len(self.output) >= self._limit else None

    def flush(self) -> bool:
        """Hands over what was made; whether there was anything."""
        if self._sent == len(self.output):
            return False
        ids, logprobs = np.array(self.output[self._sent :], np.int32), np.array(self._logprobs, np.float32)
        position = len(self.prompt) + self._sent
        self._sent, self._logprobs = len(self.output), []
        beside = {} if self.beside is None else self.beside.take(ids, position)
        self.work.items.append(TokensMade(self.index, ids, logprobs, **beside))
        return True


class Beside:
    """What was asked for beside the tokens of one sample, as far as it was made and not handed over."""

    def __init__(self, request: EngineRequest) -> None:
        self._k, self._extras = request.top_logprobs, request.extras
        self._top_ids: list[np.ndarray] = []
        self._top_logprobs: list[np.ndarray] = []
        self._candidates: list[np.ndarray] = []

    def note(self, logprobs_V: np.ndarray, draw: Draw | None) -> None:
        """One more token, drawn from a distribution whose reported logprobs are float64 [V]."""
        if self._k:
            ids = largest(logprobs_V, self._k)
            self._top_ids.append(ids)
            self._top_logprobs.append(logprobs_V[ids])
        if draw is not None and "top_p_token_ids" in self._extras:
            self._candidates.append(largest(draw.kept_V, int(np.isfinite(draw.kept_V).sum())))

    def take(self, ids: np.ndarray, position: int) -> dict[str, Any]:
        """The further fields of TokensMade for these ids, the first of which stands at `position`."""
        extras, top = {}, None
        if self._k:
            top = TopK(np.array(self._top_ids, np.int32), np.array(self._top_logprobs, np.float32))
            self._top_ids, self._top_logprobs = [], []
        if "routed_experts" in self._extras:
            extras["routed_experts"] = routed_experts(ids, position)
        if "top_p_token_ids" in self._extras:
            width = max(len(c) for c in self._candidates)
            rows = [np.pad(c, (0, width - len(c)), constant_values=PAD) for c in self._candidates]
            extras["top_p_token_ids"] = np.array(rows, np.int32)
            self._candidates = []
        return {"top": top, "extras": extras}


def text_of(token: int) -> str:
    """The one character that a token stands for where stop strings are looked for: printable ASCII, over and over."""
    return chr(32 + token % 95)


def routed_experts(ids: np.ndarray, position: int) -> np.ndarray:
    """int16 [n, layers, 2]: two different experts of 8 per layer, a function of the token and its position only."""
    places = np.arange(position, position + len(ids), dtype=np.uint64)
    key_nL = mix(mix(ids.astype(np.uint64)) ^ places)[:, None] + np.arange(LAYERS, dtype=np.uint64)
    first_nL = mix(key_nL) % np.uint64(NUM_EXPERTS)
    second_nL = (first_nL + 1 + mix(~key_nL) % np.uint64(NUM_EXPERTS - 1)) % np.uint64(NUM_EXPERTS)
    return np.stack([first_nL, second_nL], axis=-1).astype(np.int16)
