"""The samples of one request, put together from its events and proven: offsets, lengths, digests and versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from skyrl_rollout.columns import joined_extras, joined_top
from skyrl_rollout.errors import CorruptBytes
from skyrl_rollout.events import Delta, Event, Heartbeat, SampleFinished, Started
from skyrl_rollout.tokens import FinishReason, Generation, LogprobMode, Sample, TopK, VersionSpan
from skyrl_rollout.versions import versions_per_token
from skyrl_rollout.weights.manifest import content_digest


class _OpenSample:
    """The parts of one sample that have arrived; arrays are joined once, at its end."""

    __slots__ = ("extras", "ids", "logprobs", "num_tokens", "spans", "tops")

    def __init__(self) -> None:
        self.ids: list[np.ndarray] = []
        self.logprobs: list[np.ndarray] = []
        self.tops: list[TopK | None] = []
        self.extras: list[Mapping[str, np.ndarray]] = []
        self.spans: list[VersionSpan] = []
        self.num_tokens = 0

    def add(self, delta: Delta) -> None:
        n = len(delta.token_ids)
        if delta.offset != self.num_tokens:
            raise CorruptBytes(
                f"sample {delta.sample_index}: tokens from offset {delta.offset} arrived, {self.num_tokens} was next"
            )
        self.ids.append(delta.token_ids)
        self.logprobs.append(delta.logprobs)
        self.tops.append(delta.top)
        self.extras.append(delta.extras)
        self.num_tokens += n
        last = self.spans[-1] if self.spans else None
        if last and (last.weight_version, last.oldest_kv_version) == (delta.weight_version, delta.oldest_kv_version):
            self.spans[-1] = replace(last, length=last.length + n)
        elif n:
            self.spans.append(VersionSpan(delta.offset, n, delta.weight_version, delta.oldest_kv_version))

    def beside(self, where: str) -> dict[str, Any]:
        """The fields of Sample that travel beside the tokens. Raises CorruptBytes where a part lacks one."""
        try:
            return {"top": joined_top(self.tops), "extras": joined_extras(self.extras)}
        except ValueError as error:
            raise CorruptBytes(f"{where}: {error}") from None


class Assembly:
    """Takes events in order; `generation` is there once every sample has finished."""

    def __init__(
        self,
        request_id: str,
        prompt_bytes: bytes,
        num_samples: int,
        mode: LogprobMode,
        *,
        top_logprobs: int | None = None,
    ) -> None:
        """top_logprobs: how many were asked for; None: as many as come."""
        self.request_id = request_id
        self._prompt_digest = content_digest(prompt_bytes)
        self.num_samples = num_samples
        self._mode = mode
        self._top_logprobs = top_logprobs
        self.num_restarts = 0
        self._reset(None)

    def _reset(self, started: Started | None) -> None:
        self._started = started
        self._open = [_OpenSample() for _ in range(self.num_samples)]
        self._samples: dict[int, Sample] = {}
        self.num_tokens = 0

    def add(self, event: Event) -> None:
        """Raises CorruptBytes where an event contradicts the request or an earlier event."""
        if isinstance(event, Delta):
            self._sample(event.sample_index).add(event)
            self.num_tokens += len(event.token_ids)
        elif isinstance(event, SampleFinished):
            self._finish(event)
        elif isinstance(event, Started):
            self._start(event)
        else:
            assert isinstance(event, Heartbeat)

    def _start(self, event: Started) -> None:
        if event.prompt_token_digest != self._prompt_digest:
            raise CorruptBytes(f"request {self.request_id}: the server read another prompt than the one that was sent")
        if event.mode is not self._mode:
            raise CorruptBytes(
                f"request {self.request_id}: logprobs are {event.mode.name}, {self._mode.name} was asked for"
            )
        if self._started is not None:
            self.num_restarts += 1
        self._reset(event)

    def _sample(self, index: int) -> _OpenSample:
        if not 0 <= index < self.num_samples or index in self._samples:
            raise CorruptBytes(
                f"request {self.request_id}: an event for sample {index}, which does not exist or has ended "
                f"({self.num_samples} samples were asked for)"
            )
        return self._open[index]

    def _finish(self, event: SampleFinished) -> None:
        parts = self._sample(event.sample_index)
        where = f"request {self.request_id}, sample {event.sample_index}"
        if event.num_tokens != parts.num_tokens:
            raise CorruptBytes(f"{where}: {event.num_tokens} tokens were made, {parts.num_tokens} arrived")
        ids = _joined(parts.ids, np.int32)
        logprobs = _joined(parts.logprobs, np.float32)
        if event.token_digest != content_digest(ids.tobytes()):
            raise CorruptBytes(f"{where}: the {len(ids)} token ids that arrived are not those that were made")
        if event.spans != tuple(parts.spans):
            raise CorruptBytes(f"{where}: versions at its end {event.spans} are not those of its parts {parts.spans}")
        try:
            versions = versions_per_token(event.spans, len(ids))
        except ValueError as error:
            raise CorruptBytes(f"{where}: {error}") from None
        unknown = int(np.count_nonzero(np.isnan(logprobs)))
        if unknown != event.invalid_logprobs:
            raise CorruptBytes(f"{where}: {event.invalid_logprobs} logprobs are said to be unknown, {unknown} are")
        beside = parts.beside(where)
        arrived = 0 if beside["top"] is None else beside["top"].token_ids.shape[1]
        if self._top_logprobs is not None and len(ids) and arrived != self._top_logprobs:
            raise CorruptBytes(
                f"{where}: the top {self._top_logprobs} logprobs were asked for, the top {arrived} arrived"
            )
        self._samples[event.sample_index] = Sample(
            token_ids=ids,
            logprobs=logprobs,
            weight_versions=versions,
            finish_reason=event.reason,
            spans=event.spans,
            stop_match=event.stop_match,
            invalid_logprobs=event.invalid_logprobs,
            num_preemptions=event.num_preemptions,
            instance_ids=self._instances(),
            **beside,
        )

    @property
    def started(self) -> Started | None:
        """What the server said when it admitted the run that is under way."""
        return self._started

    def so_far(self, index: int) -> Sample:
        """Sample `index` as far as it has arrived, ABORTED unless it has finished."""
        if index in self._samples:
            return self._samples[index]
        parts, ids = self._open[index], _joined(self._open[index].ids, np.int32)
        logprobs, where = _joined(parts.logprobs, np.float32), f"request {self.request_id}, sample {index}"
        return Sample(
            token_ids=ids,
            logprobs=logprobs,
            weight_versions=versions_per_token(parts.spans, len(ids)),
            finish_reason=FinishReason.ABORTED,
            spans=tuple(parts.spans),
            invalid_logprobs=int(np.count_nonzero(np.isnan(logprobs))),
            instance_ids=self._instances(),
            **parts.beside(where),
        )

    def has_finished(self, index: int) -> bool:
        return index in self._samples

    @property
    def has_aborted(self) -> bool:
        """Whether the server ended a sample without its own end."""
        return any(sample.finish_reason is FinishReason.ABORTED for sample in self._samples.values())

    def _instances(self) -> tuple[str, ...]:
        return (self._started.instance_id,) if self._started is not None else ()

    def generation(
        self,
        samples: Sequence[Sample] | None = None,
        *,
        num_restarts: int = 0,
        num_moves: int = 0,
        num_kept_tokens: int = 0,
    ) -> Generation:
        """The answer. samples: instead of those of this assembly, where others made a part of them."""
        samples = [self._samples[i] for i in range(self.num_samples)] if samples is None else samples
        assert self._started is not None and len(samples) == self.num_samples
        last = samples[-1].instance_ids
        return Generation(
            request_id=self.request_id,
            instance_id=last[-1] if last else self._started.instance_id,
            samples=tuple(samples),
            effective=self._started.effective,
            mode=self._started.mode,
            cached_prompt_tokens=self._started.cached_prompt_tokens,
            prompt_logprobs=self._started.prompt_logprobs,
            num_restarts=self.num_restarts + num_restarts,
            num_moves=num_moves,
            num_kept_tokens=num_kept_tokens,
        )


def _joined(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    """One array of its own: writable, and free of the message that it came in."""
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.empty(0, dtype)
