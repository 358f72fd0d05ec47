"""How the tokens of one sample become deltas: coalesced, and cut where the weight version changed; pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import xxhash

from skyrl_rollout.columns import Columns, cut_rows
from skyrl_rollout.server.events import SampleFinished, TokenDelta
from skyrl_rollout.tokens import FinishReason, TopK
from skyrl_rollout.versions import VersionLedger
from skyrl_rollout.wire import LOGPROB_DTYPE, TOKEN_DTYPE

ITEM = 4  # bytes of an int32 id and of a float32 logprob
NO_EXTRAS: Mapping[str, np.ndarray] = {}


class SampleStream:
    """One sample that is being made. Tokens go in with `add`, deltas come out of `take`, `finish` ends it."""

    __slots__ = (
        "_columns",
        "_digest",
        "_ids",
        "_ledger",
        "_limit",
        "_logprobs",
        "_sent",
        "finished",
        "index",
        "invalid",
        "num_tokens",
    )

    def __init__(self, index: int, version: int) -> None:
        self.index = index
        self.num_tokens = 0
        self.invalid = 0
        self.finished = False
        self._ledger = VersionLedger(version)
        self._digest = xxhash.xxh3_128()
        self._ids, self._logprobs = bytearray(), bytearray()
        self._sent = 0
        self._limit: int | None = None
        self._columns: Columns | None = None

    @property
    def first_version(self) -> int:
        """The version of token 0, made or not."""
        return self._ledger.version_at(0)

    @property
    def row_nbytes(self) -> int:
        """What one token takes in a delta, at most."""
        return 2 * ITEM + (0 if self._columns is None else self._columns.row_nbytes)

    def add(
        self,
        token_ids: np.ndarray,
        logprobs: np.ndarray,
        top: TopK | None = None,
        extras: Mapping[str, np.ndarray] = NO_EXTRAS,
    ) -> int:
        """Takes int ids [k], logprobs [k] and what travels beside them; returns how many tokens wait to be taken.

        Raises ValueError when they differ in length: a dropped entry would shift every logprob after it.
        """
        if len(token_ids) != len(logprobs):
            raise ValueError(f"the engine gave {len(token_ids)} tokens with {len(logprobs)} logprobs")
        count = len(token_ids)
        if self._limit is not None and self.num_tokens + count > self._limit:
            keep = max(self._limit - self.num_tokens, 0)
            token_ids, logprobs = token_ids[:keep], logprobs[:keep]
        if top is not None or extras:
            self._columns = self._columns or Columns()
            self._columns.add(top, extras, count, len(token_ids))
        # once per engine step and sample: whatever can be done per delta is done in `take`
        self._ids += np.asarray(token_ids, TOKEN_DTYPE).tobytes()
        self._logprobs += np.asarray(logprobs, LOGPROB_DTYPE).tobytes()
        self.num_tokens += len(token_ids)
        return self.num_tokens - self._sent

    def take(self, max_bytes: int) -> list[TokenDelta]:
        """Everything that waits: one delta per weight version, and more where one would exceed `max_bytes`."""
        count = self.num_tokens - self._sent
        if not count:
            return []
        self._digest.update(self._ids)
        self.invalid += int(np.count_nonzero(np.isnan(np.frombuffer(self._logprobs, LOGPROB_DTYPE))))
        top, extras = (None, NO_EXTRAS) if self._columns is None else self._columns.take()
        most, deltas, base = max(1, max_bytes // self.row_nbytes), [], self._sent
        for offset, n, version, oldest_kv in self._ledger.split(base, count):
            for start in range(offset, offset + n, most):
                a, b = start - base, min(start + most, offset + n) - base
                ids, logprobs = bytes(self._ids[a * ITEM : b * ITEM]), bytes(self._logprobs[a * ITEM : b * ITEM])
                beside = () if self._columns is None else cut_rows(top, extras, a, b)
                deltas.append(TokenDelta(self.index, start, ids, logprobs, version, oldest_kv, *beside))
        self._ids.clear()
        self._logprobs.clear()
        self._sent = self.num_tokens
        return deltas

    def cut(self, num_tokens_made: int, new_version: int, *, retain_kv: bool) -> None:
        """Tokens from `num_tokens_made` on come from `new_version`; with retain_kv they attend to the old KV."""
        self._ledger.cut(num_tokens_made, new_version, self._ledger.oldest_kv if retain_kv else None)

    def stop_at(self, num_tokens: int) -> None:
        """No token beyond this count is reported, whatever the engine still hands over."""
        self._limit = num_tokens

    def finish(self, reason: FinishReason, stop_match: int | str | None, num_preemptions: int) -> SampleFinished:
        """Call after the last `take`."""
        self.finished = True
        return SampleFinished(
            self.index,
            reason,
            self.num_tokens,
            self._digest.digest(),
            self._ledger.spans(self.num_tokens),
            self.invalid,
            num_preemptions,
            stop_match,
        )
