"""One rollout server seen from a trainer or another caller: typed calls with deadlines; no protobuf object gets out."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing

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
from skyrl_rollout.security import ANONYMOUS, Credentials
from skyrl_rollout.server_info import ServerInfo, info_from_pb
from skyrl_rollout.status import ServerStatus, status_from_pb
from skyrl_rollout.tokens import Generation, LogprobMode, Sampling
from skyrl_rollout.v1 import control_pb2, control_pb2_grpc, generation_pb2, generation_pb2_grpc

CALL_TIMEOUT_S = 10.0
DETACH_GRACE_S = 60.0
TOKENS_PER_EVENT = 64
_ON_COMMIT = {
    "continue": generation_pb2.VersionPolicy.ON_COMMIT_CONTINUE,
    "stop": generation_pb2.VersionPolicy.ON_COMMIT_STOP,
}


class RolloutClient:
    """Made by `connect`; belongs to the event loop it was made on. `info` is the last answer to GetServerInfo."""

    def __init__(self, url: str, credentials: Credentials, heartbeat_s: float) -> None:
        self.url = url
        self._credentials = credentials
        self._heartbeat_s = heartbeat_s
        self._caller = Caller(url, credentials.metadata())
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

        Raises ValueError for a bad url, ServerUnreachable within `timeout_s`, ProtocolMismatch naming both versions.
        """
        client = cls(url, credentials or ANONYMOUS, heartbeat_s)
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
        *,
        mode: LogprobMode,
        timeout_s: float,
        num_samples: int = 1,
        request_id: str | None = None,
        min_weight_version: int | None = None,
        on_commit: str = "continue",
        detach_grace_s: float = DETACH_GRACE_S,
        unreachable_s: float | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> Generation:
        """Continues a prompt and returns every sample with its ids, logprobs and versions, each verified.

        min_weight_version: waits until it is committed. on_commit: "continue" under new weights, or "stop" there.
        detach_grace_s: how long the server keeps working while the connection is broken; 0: a break is an error.
        unreachable_s: how long the server may stay away (default: until the timeout). on_progress: called with the
        number of tokens so far; without it tokens come in one message per sample. Raises MissingCapability before
        anything is sent, else what `AttachedStream.events` raises. Leaving early aborts the work.
        """
        request_id = request_id or str(uuid.uuid4())
        assembly = Assembly(request_id, wire.token_bytes(prompt_token_ids), num_samples, mode)
        events = self.generate_events(
            prompt_token_ids, sampling, mode=mode, timeout_s=timeout_s, num_samples=num_samples, request_id=request_id,
            min_weight_version=min_weight_version, on_commit=on_commit, detach_grace_s=detach_grace_s,
            unreachable_s=unreachable_s, final_only=on_progress is None,
        )  # fmt: skip
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
        *,
        mode: LogprobMode,
        timeout_s: float,
        num_samples: int = 1,
        request_id: str | None = None,
        min_weight_version: int | None = None,
        on_commit: str = "continue",
        detach_grace_s: float = DETACH_GRACE_S,
        unreachable_s: float | None = None,
        tokens_per_event: int = TOKENS_PER_EVENT,
        max_event_delay_s: float | None = None,
        final_only: bool = False,
        restarts: bool = True,
    ) -> AsyncGenerator[Event, None]:
        """The events behind `generate`, as they come: Started, Delta, SampleFinished, Heartbeat.

        A second `Started` says that the server was replaced and the run began anew; with restarts=False that is
        ServerReplaced instead. A Delta comes every `tokens_per_event` tokens, or after `max_event_delay_s` (unset: the
        server's default) where there are fewer; final_only: one per sample and version, at the sample's end.
        """
        request = self._request(
            request_id or str(uuid.uuid4()), prompt_token_ids, sampling, mode=mode, num_samples=num_samples,
            on_commit=on_commit, min_weight_version=min_weight_version, detach_grace_s=detach_grace_s,
            final_only=final_only, tokens_per_event=tokens_per_event,
        )  # fmt: skip
        if max_event_delay_s is not None:
            request.stream.max_event_delay.FromNanoseconds(int(max_event_delay_s * 1e9))
        away_s = timeout_s if unreachable_s is None else unreachable_s
        patience = Patience(timeout_s, away_s, 6 * self._heartbeat_s, restarts=restarts)
        async with aclosing(self._run(request, patience)) as events:
            async for event in events:
                yield event

    def _request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | np.ndarray,
        sampling: Sampling,
        *,
        mode: LogprobMode,
        num_samples: int,
        on_commit: str,
        min_weight_version: int | None,
        detach_grace_s: float,
        final_only: bool,
        tokens_per_event: int,
    ) -> generation_pb2.GenerateRequest:
        offers = self.info.capabilities
        offers.need("logprob_modes", f"logprob mode {mode.name}", among=mode)
        if sampling.stop_strings:
            offers.need("stop_strings", f"stopping at {list(sampling.stop_strings)}")
        if on_commit not in _ON_COMMIT:
            raise ValueError(f"on_commit is one of {sorted(_ON_COMMIT)}, not {on_commit!r}")
        if num_samples < 1:
            raise ValueError(f"num_samples is at least 1, not {num_samples}")
        version = generation_pb2.VersionPolicy(min_weight_version=min_weight_version, on_commit=_ON_COMMIT[on_commit])
        request = generation_pb2.GenerateRequest(
            request_id=request_id,
            prompt_token_ids=wire.token_bytes(prompt_token_ids),
            sampling=wire.sampling_to_pb(sampling),
            logprobs=generation_pb2.LogprobOptions(mode=wire.LOGPROB_MODES[mode]),
            num_samples=num_samples,
            version=version,
            stream=generation_pb2.StreamOptions(final_only=final_only, min_tokens_per_event=tokens_per_event),
        )
        request.stream.heartbeat.FromNanoseconds(int(self._heartbeat_s * 1e9))
        if detach_grace_s > 0:
            request.detach_grace.FromNanoseconds(int(detach_grace_s * 1e9))
        return request

    async def _run(self, request: generation_pb2.GenerateRequest, patience: Patience) -> AsyncGenerator[Event, None]:
        stream = AttachedStream(self._channel, self._caller, request, patience)
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
        self, request_ids: Iterable[str], *, reason: str = "", timeout_s: float = CALL_TIMEOUT_S
    ) -> tuple[list[str], list[str]]:
        """Ends generations; their callers get FinishReason.ABORTED with the tokens made. Returns (aborted, unknown)."""
        self.info.capabilities.need("abort", "aborting a generation")
        request = generation_pb2.AbortGenerationsRequest(request_ids=list(request_ids), reason=reason)
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
