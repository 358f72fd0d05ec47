"""One rollout server seen from a trainer or another caller: typed calls with deadlines; no protobuf object gets out."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc.aio
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from skyrl_rollout import wire
from skyrl_rollout.assembly import Assembly
from skyrl_rollout.attach import AttachedStream, Patience
from skyrl_rollout.calls import Caller, unreachable
from skyrl_rollout.channel import KEEPALIVE_INTERVAL_MS, open_channel
from skyrl_rollout.errors import DeadlineExceeded, ServerUnreachable, from_rpc_error
from skyrl_rollout.events import Event
from skyrl_rollout.protocol import NEEDED_SERVER_MINOR, PROTOCOL_MINOR, build, check_server
from skyrl_rollout.requests import GenerateOptions, check_offered, check_top, generate_request
from skyrl_rollout.scoring import score_request, scores_from_pb
from skyrl_rollout.security import Credentials
from skyrl_rollout.server_info import ServerInfo, info_from_pb
from skyrl_rollout.status import ServerStatus, status_from_pb
from skyrl_rollout.tokens import Generation, LogprobMode, Sampling, Scores
from skyrl_rollout.v1 import control_pb2, control_pb2_grpc, generation_pb2, generation_pb2_grpc

CALL_TIMEOUT_S = 10.0
DEFAULT_OPTIONS = GenerateOptions()


class RolloutClient:
    """Made by `connect`; belongs to the event loop it was made on. `info` is the last answer to GetServerInfo."""

    def __init__(self, url: str, credentials: Credentials, heartbeat_s: float) -> None:
        self.url = url
        self._credentials = credentials
        self._heartbeat_s = heartbeat_s
        self._caller = Caller(url, credentials)
        self._cleanups: set[asyncio.Task[None]] = set()
        self.info: ServerInfo
        self._open(KEEPALIVE_INTERVAL_MS)

    def _open(self, keepalive_interval_ms: int) -> None:
        self._keepalive_interval_ms = keepalive_interval_ms
        self._channel = open_channel(self.url, self._credentials, keepalive_interval_ms=keepalive_interval_ms)
        self._engine = control_pb2_grpc.EngineServiceStub(self._channel)
        self._rollout = generation_pb2_grpc.RolloutServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        credentials: Credentials | None = None,
        heartbeat_s: float = 5.0,
        needed_minor: int = NEEDED_SERVER_MINOR,
    ) -> RolloutClient:
        """Dials, asks who is there and checks the protocol version.

        credentials: None shows what the environment names (`security.ENVIRONMENT`).
        Raises ValueError for a bad url, ServerUnreachable within `timeout_s`, ProtocolMismatch naming both versions.
        """
        client = cls(url, credentials or Credentials.from_environment(), heartbeat_s)
        try:
            try:
                info = await client.refresh(timeout_s=timeout_s)
            except DeadlineExceeded as error:
                raise unreachable(url, "GetServerInfo", timeout_s, error) from None
            check_server(info.protocol_minor, info.server_build, url, needed_minor=needed_minor)
            if info.limits.keepalive_min_interval_ms > client._keepalive_interval_ms:
                await client._channel.close()
                client._open(info.limits.keepalive_min_interval_ms)
        except BaseException:
            await client.close()
            raise
        return client

    async def __aenter__(self) -> RolloutClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def refresh(self, *, timeout_s: float = CALL_TIMEOUT_S) -> ServerInfo:
        """Asks GetServerInfo again; a new `instance_id` means that the process was replaced."""
        request = control_pb2.GetServerInfoRequest(client_minor=PROTOCOL_MINOR, client_build=build())
        pb = await self._caller(self._engine.GetServerInfo, request, what="GetServerInfo", timeout_s=timeout_s)
        self.info = info_from_pb(pb, self.url)
        return self.info

    async def generate(
        self,
        prompt_token_ids: Sequence[int] | np.ndarray,
        sampling: Sampling,
        options: GenerateOptions = DEFAULT_OPTIONS,
        *,
        mode: LogprobMode,
        timeout_s: float,
        request_id: str | None = None,
        on_progress: Callable[[int], None] | None = None,
        **changes: Any,
    ) -> Generation:
        """Continues a prompt and returns every sample with its ids, logprobs and versions, each verified.

        changes: fields of `GenerateOptions`, put over `options`. on_progress: called with the number of tokens so far;
        without it tokens come in one message per sample. Raises MissingCapability before anything is sent, else what
        `AttachedStream.events` raises. Leaving early aborts the work.
        """
        options = replace(options, **changes, final_only=on_progress is None)
        request_id = request_id or str(uuid.uuid4())
        prompt = wire.token_bytes(prompt_token_ids)
        assembly = Assembly(request_id, prompt, options.num_samples, mode, top_logprobs=options.top_logprobs)
        events = self.generate_events(
            prompt_token_ids, sampling, options, mode=mode, timeout_s=timeout_s, request_id=request_id
        )
        async with aclosing(events):
            async for event in events:
                assembly.add(event)
                if on_progress is not None:
                    on_progress(assembly.num_tokens)
        return assembly.generation()

    async def generate_events(
        self,
        prompt_token_ids: Sequence[int] | np.ndarray,
        sampling: Sampling,
        options: GenerateOptions = DEFAULT_OPTIONS,
        *,
        mode: LogprobMode,
        timeout_s: float,
        request_id: str | None = None,
        **changes: Any,
    ) -> AsyncGenerator[Event, None]:
        """The events behind `generate`, as they come: Started, Delta, SampleFinished, Heartbeat.

        A second `Started` says that the server was replaced and the run began anew. changes: as for `generate`.
        """
        options = replace(options, **changes)
        check_offered(self.info, sampling, mode, options)
        request = generate_request(
            prompt_token_ids, sampling, mode, options,
            request_id=request_id or str(uuid.uuid4()), heartbeat_s=self._heartbeat_s,
        )  # fmt: skip
        away_s = timeout_s if options.unreachable_s is None else options.unreachable_s
        patience = Patience(timeout_s, away_s, 6 * self._heartbeat_s, restarts=options.restarts)
        async with aclosing(self._run(request, patience)) as events:
            async for event in events:
                yield event

    async def score(
        self,
        token_ids: Sequence[int] | np.ndarray,
        score_from: int,
        *,
        mode: LogprobMode,
        temperature: float = 1.0,
        top_logprobs: int = 0,
        timeout_s: float,
        policy_id: str = "",
        min_weight_version: int | None = None,
    ) -> Scores:
        """How probable token_ids[score_from:] are, each after all before it, under one weight version; verified.

        mode: SAMPLING is TEMPERATURE here. Raises MissingCapability before anything is sent, ValueError for a
        `score_from` that leaves nothing, else the typed error of the server, DeadlineExceeded or ServerUnreachable.
        """
        self.info.capabilities.need("score", "Score")
        check_top(self.info, top_logprobs)
        request = score_request(
            token_ids, score_from, mode=mode, temperature=temperature, top_logprobs=top_logprobs, policy_id=policy_id,
            min_weight_version=min_weight_version,
        )  # fmt: skip
        responses = await self._caller(self._score, request, what="Score", timeout_s=timeout_s)
        return scores_from_pb(request, responses, mode)

    async def _score(self, request: generation_pb2.ScoreRequest, **call: Any) -> list[generation_pb2.ScoreResponse]:
        return [response async for response in self._rollout.Score(request, **call)]

    async def _run(self, request: generation_pb2.GenerateRequest, patience: Patience) -> AsyncGenerator[Event, None]:
        stream = AttachedStream(self._rollout, self._engine, self._caller, request, patience)
        try:
            async with aclosing(stream.events()) as events:
                async for event in events:
                    yield event
        finally:
            if not stream.is_complete and request.HasField("detach_grace"):
                # Nobody comes back for it: without this the server would work on through the grace.
                self._later(self._abort(generation_pb2.AbortGenerationsRequest(request_ids=[request.request_id])))

    def _later(self, cleanup: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(cleanup)
        self._cleanups.add(task)
        task.add_done_callback(self._cleanups.discard)

    async def _abort(self, request: generation_pb2.AbortGenerationsRequest) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.UsageError):  # the channel may be closed by then
            await self._rollout.AbortGenerations(request, timeout=2.0, metadata=self._caller.metadata)

    async def abort(
        self,
        request_ids: Iterable[str] = (),
        *,
        everything: bool = False,
        reason: str = "",
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> tuple[list[str], list[str]]:
        """Ends generations, those named or everything; their callers get FinishReason.ABORTED with the tokens made.

        Returns (aborted, unknown).
        """
        self.info.capabilities.need("abort", "aborting a generation")
        request = generation_pb2.AbortGenerationsRequest(request_ids=list(request_ids), all=everything, reason=reason)
        pb = await self._caller(self._rollout.AbortGenerations, request, what="AbortGenerations", timeout_s=timeout_s)
        return list(pb.aborted), list(pb.not_found)

    async def acquire_control(
        self, owner: str, *, claim_epoch: int | None = None, timeout_s: float = CALL_TIMEOUT_S
    ) -> int:
        """The epoch that fences every control call. claim_epoch: a given one above all seen. Raises Fenced."""
        request = control_pb2.AcquireControlRequest(owner=owner, claim_epoch=claim_epoch)
        pb = await self._caller(self._engine.AcquireControl, request, what="AcquireControl", timeout_s=timeout_s)
        epoch: int = pb.trainer_epoch
        return epoch

    async def pause(
        self,
        epoch: int,
        mode: str,
        *,
        admission: str = "queue",
        lease_s: float = 60.0,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> str:
        """Stops tokens: mode "abort", "wait" or "keep"; admission of new work "queue" or "reject".

        Returns the pause id. The server resumes alone after `lease_s`; a deadline that expires ends the pause too.
        """
        for value, table in ((mode, wire.PAUSE_MODES), (admission, wire.ADMISSIONS)):
            if value not in table:
                raise ValueError(f"{value!r} is not one of {sorted(table)}")
        self.info.capabilities.need("pause_modes", f"pause mode {mode!r}", among=mode)
        request = control_pb2.PauseRequest(
            fence=_fence(epoch), mode=wire.PAUSE_MODES[mode], admission=wire.ADMISSIONS[admission]
        )
        request.lease.FromNanoseconds(int(lease_s * 1e9))
        pb = await self._caller(self._engine.Pause, request, what="Pause", timeout_s=timeout_s)
        pause_id: str = pb.pause_id
        return pause_id

    async def resume(self, epoch: int, pause_id: str, *, timeout_s: float = CALL_TIMEOUT_S) -> int:
        """Ends that pause; returns the version that serves. Raises UnknownPause when it is not held (any more)."""
        request = control_pb2.ResumeRequest(fence=_fence(epoch), pause_id=pause_id)
        pb = await self._caller(self._engine.Resume, request, what="Resume", timeout_s=timeout_s)
        version: int = pb.weight_version
        return version

    async def status(self, *, timeout_s: float = CALL_TIMEOUT_S) -> ServerStatus:
        """State, versions and load at this moment."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), aclosing(self.watch_status(timeout_s)) as reports:
                async for report in reports:
                    return report
        raise DeadlineExceeded(f"no answer to WatchStatus within {timeout_s:g} s from {self.url}")

    async def watch_status(
        self, interval_s: float = 1.0, *, silence_s: float | None = None
    ) -> AsyncGenerator[ServerStatus, None]:
        """A report at once and then every `interval_s`. Raises ServerUnreachable when none came for `silence_s`
        (default: 6 heartbeats longer)."""
        request = control_pb2.WatchStatusRequest()
        request.interval.FromNanoseconds(int(interval_s * 1e9))
        call = self._engine.WatchStatus(request, metadata=self._caller.metadata)
        silence_s = interval_s + 6 * self._heartbeat_s if silence_s is None else silence_s
        try:
            while True:
                async with asyncio.timeout(silence_s):
                    pb = await call.read()
                if pb is grpc.aio.EOF:
                    return
                yield status_from_pb(pb)
        except TimeoutError:
            raise ServerUnreachable(f"no report of WatchStatus within {silence_s:g} s from {self.url}") from None
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, endpoint=self.url) from None
        finally:
            call.cancel()

    async def health(self, service: str = "", *, timeout_s: float = CALL_TIMEOUT_S) -> bool:
        """Whether `service` ("" is the whole server) can serve. An unreachable server is an error, not False."""
        request = health_pb2.HealthCheckRequest(service=service)
        pb = await self._caller(self._health.Check, request, what="health Check", timeout_s=timeout_s)
        return bool(pb.status == health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        """Waits for aborts under way (2 s at most) and closes the connection; running generations end in an error."""
        if self._cleanups:
            await asyncio.wait(self._cleanups, timeout=2.5)
        await self._channel.close()


def _fence(epoch: int) -> control_pb2.Fence:
    return control_pb2.Fence(trainer_epoch=epoch, op_id=str(uuid.uuid4()))
