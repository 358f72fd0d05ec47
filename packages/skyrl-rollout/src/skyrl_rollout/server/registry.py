"""Which runs exist on this server: at most one per request id, bounded in number, kept for replay after their end."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from skyrl_rollout.errors import InvalidRequest, Overloaded, RequestIdReused, RolloutError
from skyrl_rollout.server.admission import GenerationRequest, check_size, complete, engine_request
from skyrl_rollout.server.engine import Engine
from skyrl_rollout.server.options import ServerOptions
from skyrl_rollout.server.runs import Run
from skyrl_rollout.server.signals import Signal
from skyrl_rollout.server.state import BASE_POLICY, EngineState, ServerState

RETRY_AFTER_S = 1.0
MAX_EVENT_BYTES = 1 << 20  # larger messages stall the other calls of an asyncio server


def max_event_bytes(options: ServerOptions) -> int:
    """How much of an answer goes into one message: well below what a message may hold."""
    return min(MAX_EVENT_BYTES, options.max_message_bytes // 2)


class RunRegistry:
    """All runs by request id. `changed` fires when a run ends or loses its last reader."""

    def __init__(self, engine: Engine, state: ServerState, options: ServerOptions) -> None:
        self.changed = Signal()
        self._engine, self._state, self._options = engine, state, options
        self._active: dict[str, Run] = {}
        self._ended: OrderedDict[str, Run] = OrderedDict()
        self._slots_taken = 0
        self._retained_bytes = 0
        self._tokens_of_ended = 0

    @property
    def running(self) -> int:
        return sum(run.is_started for run in self._active.values())

    @property
    def waiting(self) -> int:
        return len(self._active) - self.running

    @property
    def frozen(self) -> int:
        return self.running if self._state.state in (EngineState.PAUSED, EngineState.COMMITTING) else 0

    @property
    def tokens_generated(self) -> int:
        return self._tokens_of_ended + sum(run.num_tokens for run in self._active.values())

    def attach(self, request: GenerationRequest, resume_after: int) -> tuple[Run, int]:
        """The run of this request id, new or existing, and after which event to read.

        A new run is read from its start whatever `resume_after` says: it is not the run that the caller remembers.
        Raises RequestIdReused, Overloaded, or the reason why new work is refused.
        """
        run = self._active.get(request.request_id) or self._ended.get(request.request_id)
        if run is None:
            run, resume_after = self._create(request), 0
        elif run.request.identity != request.identity:
            raise RequestIdReused(
                f"request id {request.request_id} was used for another request: mint a new UUID for every request"
            )
        elif resume_after > run.log.last_seq:
            raise InvalidRequest(
                f"resume_after is {resume_after}, but request {request.request_id} has {run.log.last_seq} events so far"
            )
        run.calls += 1
        run.detached.release()
        return run, resume_after

    def detach(self, run: Run, *, deadline_passed: bool) -> None:
        """One reader has gone. Without another the work ends, after its grace unless its deadline passed."""
        run.calls -= 1
        if run.calls == 0 and not run.log.closed:
            if deadline_passed or run.request.detach_grace_s == 0:
                run.drop()
            else:
                run.detached.renew(run.request.detach_grace_s)
        self.changed.fire()

    async def abort(self, request_ids: Iterable[str]) -> tuple[list[str], list[str]]:
        """(aborted, not found): a run that has ended counts as not found."""
        found: list[str] = []
        missing: list[str] = []
        for request_id in dict.fromkeys(request_ids):
            run = self._active.get(request_id)
            if run is None:
                missing.append(request_id)
            else:
                await run.abort()
                found.append(request_id)
        return found, missing

    def active_ids(self) -> list[str]:
        """Request ids of every run that has not ended."""
        return list(self._active)

    def ids_of(self, policy_id: str) -> list[str]:
        """Request ids of every run of this policy that has not ended."""
        return [request_id for request_id, run in self._active.items() if run.request.policy_id == policy_id]

    def drop_queued(self) -> None:
        """Ends every run that has not started; its readers are told ABORTED."""
        for run in list(self._active.values()):
            if not run.is_started:
                run.drop()

    def drop_all(self) -> None:
        for run in list(self._active.values()):
            run.drop()

    async def cut(self, new_version: int, policy_id: str = BASE_POLICY, *, retain_kv: bool) -> int:
        """While the engine is paused: notes for every run of the policy where `new_version` begins, and ends those that
        must not mix versions. New base weights end every adapter's run too: it was trained on other ones. Returns how
        many were ended."""
        made = self._engine.tokens_made()
        stopped = []
        for run in [run for run in self._active.values() if run.is_started]:
            is_own = run.request.policy_id == policy_id
            if not is_own and policy_id != BASE_POLICY:
                continue
            tokens_made = made.get(run.request.request_id)
            if run.cut(tokens_made, new_version, retain_kv=retain_kv, stops=not is_own):
                stopped.append(run)
        for run in stopped:
            await run.abort()
        return len(stopped)

    async def all_started_finished(self) -> None:
        while started := [run for run in self._active.values() if run.is_started]:
            await started[0].finished()

    async def all_ended(self) -> None:
        while self._active or self._slots_taken:
            await self.changed.wait()

    async def all_read(self) -> None:
        """Returns when no call is attached to any run."""
        while any(run.calls for run in (*self._active.values(), *self._ended.values())):
            await self.changed.wait()

    @property
    def slots_taken(self) -> int:
        """Work that is not a run: scores."""
        return self._slots_taken

    @contextmanager
    def slot(self) -> Iterator[None]:
        """A place among the concurrent requests for work that is not a run. Raises Overloaded."""
        self._refuse_overload()
        self._slots_taken += 1
        try:
            yield
        finally:
            self._slots_taken -= 1
            self.changed.fire()

    def _refuse_overload(self) -> None:
        taken = len(self._active) + self._slots_taken
        if taken >= self._options.max_concurrent:
            raise Overloaded(
                f"{taken} requests are queued or running, the limit is {self._options.max_concurrent}: "
                f"retry later or use another replica",
                retry_after_s=RETRY_AFTER_S,
            )

    def _create(self, request: GenerationRequest) -> Run:
        self._state.refuse_new_work()
        self._refuse_overload()
        version = self._state.version_of(request.policy_id)
        model = self._engine.identity
        request = complete(request, model, self._engine.capabilities)
        check_size(request, model, self._options)
        try:
            self._engine.check(engine_request(request, version, self._state.weight_version))
        except RolloutError:
            raise
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        run = Run(request, self._engine, self._state, max_event_bytes=max_event_bytes(self._options))
        self._active[request.request_id] = run
        run.on_end(self._retain)
        return run

    def _retain(self, run: Run) -> None:
        request_id = run.request.request_id
        del self._active[request_id]
        self._ended[request_id] = run
        self._tokens_of_ended += run.num_tokens
        self._retained_bytes += run.log.nbytes
        self.changed.fire()
        while self._retained_bytes > self._options.retained_bytes and len(self._ended) > 1:
            self._forget(next(iter(self._ended)))
        asyncio.get_running_loop().call_later(self._options.request_retention_s, self._forget, request_id)

    def _forget(self, request_id: str) -> None:
        run = self._ended.pop(request_id, None)
        if run is not None:
            self._retained_bytes -= run.log.nbytes
