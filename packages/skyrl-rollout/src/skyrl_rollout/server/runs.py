"""One execution of one generation request: engine work in, a numbered event log out, any number of readers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import numpy as np

from skyrl_rollout.errors import RolloutError
from skyrl_rollout.server.admission import GenerationRequest, engine_request
from skyrl_rollout.server.engine import Engine, PromptRead, SampleEnded, TokensMade
from skyrl_rollout.server.events import Event, Heartbeat, Started, WorkPhase
from skyrl_rollout.server.leases import Lease
from skyrl_rollout.server.replay import EventLog
from skyrl_rollout.server.samples import SampleStream
from skyrl_rollout.server.signals import Signal
from skyrl_rollout.server.state import EngineState, ServerState
from skyrl_rollout.tokens import FinishReason
from skyrl_rollout.wire import LOGPROB_DTYPE

logger = logging.getLogger(__name__)
EVENT_OVERHEAD_BYTES = 200
ABORT_PATIENCE_S = 1.0


class Run:
    """Queued until the server serves the wanted version, then running, then ended and kept for replay."""

    def __init__(self, request: GenerationRequest, engine: Engine, state: ServerState, *, max_event_bytes: int) -> None:
        self.request = request
        self.log = EventLog()
        self.samples: list[SampleStream] = []
        self.changed = Signal()
        self.calls = 0
        self.detached = Lease(self.drop)
        self._engine, self._state = engine, state
        self._max_event_bytes = max_event_bytes
        self._flush_timer: asyncio.TimerHandle | None = None
        self._stopped_by_commit = False
        self._task = asyncio.create_task(self._execute(), name=f"generate {request.request_id}")
        self._task.add_done_callback(self._end)

    @property
    def is_started(self) -> bool:
        """Whether the engine may hold work of it."""
        return bool(self.samples) and not self.log.closed

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.samples)

    @property
    def phase(self) -> WorkPhase:
        if not self.samples:
            return WorkPhase.QUEUED
        frozen = self._state.state in (EngineState.PAUSED, EngineState.COMMITTING)
        return WorkPhase.PAUSED if frozen else WorkPhase.RUNNING

    async def follow(self, resume_after: int) -> AsyncIterator[tuple[int, Event | Heartbeat]]:
        """(seq, event) of everything after `resume_after`, with a heartbeat in every silence. Raises the run's error
        after its last event."""
        seen = resume_after
        while True:
            for seq, event in self.log.after(seen):
                yield seq, event
                seen = seq
            if seen < self.log.last_seq:
                continue
            if self.log.closed:
                break
            if not await self.changed.wait(self.request.heartbeat_s):
                yield seen, Heartbeat(self.phase, self.num_tokens)
        if self.log.error is not None:
            raise self.log.error

    def drop(self) -> None:
        """Ends the work at once, because nobody reads it; the engine's slot is freed."""
        self._task.cancel()

    async def abort(self) -> None:
        """Ends the work with FinishReason.ABORTED; every token made so far is kept."""
        if not self.is_started:
            self._task.cancel()
            return
        await self._engine.abort(self.request.request_id)
        # an engine may not know the request yet: closing its iterator ends the work in any case
        asyncio.get_running_loop().call_later(ABORT_PATIENCE_S, self.drop)

    def on_end(self, call: Callable[[Run], None]) -> None:
        """`call` is called once, when the log is closed."""
        self._task.add_done_callback(lambda _: call(self))

    async def finished(self) -> None:
        """Returns when the engine holds nothing of this run any more."""
        while not self.log.closed:
            await self.changed.wait()

    def cut(self, tokens_made: list[int] | None, new_version: int, *, retain_kv: bool, stops: bool) -> bool:
        """Notes, while the engine is paused, where `new_version` begins; returns whether the run must stop there, which
        is so where it asked for that or `stops` says so."""
        stops = stops or self.request.stops_on_commit
        for s in self.samples:
            if s.finished:
                continue
            # not listed by the engine: it has not seen the request yet, or it made everything and forgot it
            made = tokens_made[s.index] if tokens_made is not None else s.num_tokens
            if stops:
                s.stop_at(made)
            else:
                s.cut(made, new_version, retain_kv=retain_kv)
        self._stopped_by_commit |= stops
        return stops

    async def _execute(self) -> None:
        await self._state.admission(self.request.min_weight_version, self.request.policy_id)
        version = self._state.version_of(self.request.policy_id)
        self._begin(version)
        request = engine_request(self.request, version, self._state.weight_version)
        async with aclosing(self._engine.generate(request)) as stream:
            async for item in stream:
                if isinstance(item, TokensMade):
                    self._take_tokens(item)
                elif isinstance(item, SampleEnded):
                    self._finish_sample(self.samples[item.sample_index], item)
                else:
                    self._tell_started(item)

    def _begin(self, version: int) -> None:
        """The engine holds work from here on; readers learn that once it has read the prompt, where it tells so."""
        self.samples = [SampleStream(i, version) for i in range(self.request.num_samples)]
        offers = self._engine.capabilities
        if not (offers.prompt_logprobs or offers.cached_prompt_tokens):
            self._tell_started(PromptRead())

    def _tell_started(self, read: PromptRead) -> None:
        if self.log.last_seq:
            raise ValueError("the engine yielded PromptRead after its first token, or twice")
        r, logprobs = self.request, np.full(self.request.prompt_last_n, np.nan, LOGPROB_DTYPE)
        if read.logprobs is not None:
            logprobs[:] = read.logprobs
        started = Started(
            self._state.instance_id,
            self.samples[0].first_version,
            r.sampling,
            r.mode,
            r.prompt_digest,
            read.cached_tokens,
            logprobs.tobytes(),
        )
        self._append(started)
        self.changed.fire()

    def _take_tokens(self, made: TokensMade) -> None:
        sample = self.samples[made.sample_index]
        waiting = sample.add(made.token_ids, made.logprobs, made.top, made.extras)
        if waiting * sample.row_nbytes >= self._max_event_bytes:
            self._flush(sample)
        elif self.request.final_only:
            return
        elif waiting >= self.request.min_tokens_per_event:
            self._flush(sample)
        elif waiting and self._flush_timer is None:
            loop = asyncio.get_running_loop()
            self._flush_timer = loop.call_later(self.request.max_event_delay_s, self._flush_all)

    def _flush_all(self) -> None:
        self._flush_timer = None
        for sample in self.samples:
            if not sample.finished:
                self._flush(sample)

    def _flush(self, sample: SampleStream) -> None:
        for delta in sample.take(self._max_event_bytes):
            self._append(delta)
        self.changed.fire()

    def _finish_sample(self, sample: SampleStream, ended: SampleEnded) -> None:
        reason = ended.reason
        if self._stopped_by_commit and reason is FinishReason.ABORTED:
            reason = FinishReason.VERSION_CHANGED
        for delta in sample.take(self._max_event_bytes):
            self._append(delta)
        self._append(sample.finish(reason, ended.stop_match, ended.num_preemptions))
        self.changed.fire()

    def _append(self, event: Event) -> None:
        if not self.log.last_seq and not isinstance(event, Started):
            self._tell_started(PromptRead())  # it ended before the prompt was read
        self.log.append(event, event.nbytes + EVENT_OVERHEAD_BYTES)

    def _end(self, task: asyncio.Task[None]) -> None:
        self.detached.release()
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        error = _as_error(None if task.cancelled() else task.exception(), self.request.request_id)
        if error is None and not self.samples:
            self._begin(self._state.versions.get(self.request.policy_id, 0))
        for sample in self.samples:
            if not sample.finished and error is None:
                if not task.cancelled():
                    error = RolloutError(f"the engine ended request {self.request.request_id} without saying why")
                    break
                self._finish_sample(sample, SampleEnded(sample.index, FinishReason.ABORTED))
        self.log.close(error)
        self.changed.fire()


def _as_error(raised: BaseException | None, request_id: str) -> RolloutError | None:
    if raised is None or isinstance(raised, RolloutError):
        return raised
    logger.error("request %s failed in the engine", request_id, exc_info=raised)
    return RolloutError(f"the engine failed on request {request_id}: {type(raised).__name__}: {raised}")
