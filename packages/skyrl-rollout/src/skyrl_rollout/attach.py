"""The events of one request over as many connections as it takes: none lost, none twice, or an error that says why."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import grpc
import grpc.aio

from skyrl_rollout.calls import Backoff, Caller, closed_here, unreachable
from skyrl_rollout.errors import (
    CorruptBytes,
    DeadlineExceeded,
    RolloutError,
    ServerReplaced,
    ServerUnreachable,
    from_rpc_error,
)
from skyrl_rollout.events import Event, Heartbeat, SampleFinished, Started, event_from_pb
from skyrl_rollout.v1 import control_pb2, control_pb2_grpc, generation_pb2, generation_pb2_grpc

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Patience:
    """timeout_s: for the whole request. unreachable_s: how long a server may stay away before ServerUnreachable.
    silence_s: how long a connection may bring nothing, heartbeats included, before it counts as broken. restarts:
    whether the run begins anew on another instance of the server; else that is ServerReplaced."""

    timeout_s: float
    unreachable_s: float
    silence_s: float
    restarts: bool = True


class AttachedStream:
    """Runs one GenerateRequest to its end. A broken connection is made again with the same request id and
    `resume_after`; on an instance of the server that never saw the request the run starts over with a new `Started`,
    where `patience` lets it."""

    def __init__(
        self,
        rollout: generation_pb2_grpc.RolloutServiceStub,
        engine: control_pb2_grpc.EngineServiceStub,
        caller: Caller,
        request: generation_pb2.GenerateRequest,
        patience: Patience,
    ) -> None:
        self._generate, self._get_info = rollout.Generate, engine.GetServerInfo
        self._caller = caller
        self._request = request
        self._patience = patience
        self._open_samples = request.num_samples
        self._seq = 0
        self._instance = ""

    @property
    def is_complete(self) -> bool:
        return self._open_samples == 0

    async def events(self) -> AsyncGenerator[Event, None]:
        """Typed events in order, seq dense. Raises the server's error, DeadlineExceeded, ServerUnreachable,
        ServerReplaced or CorruptBytes."""
        loop = asyncio.get_running_loop()
        self._deadline = loop.time() + self._patience.timeout_s
        self._heard_at = loop.time()
        backoff = Backoff()
        while True:
            try:
                if self._seq:
                    await self._settle_instance()
                async with aclosing(self._connection()) as connection:
                    async for event in connection:
                        backoff.reset()
                        yield event
                if self.is_complete:
                    return
                error: RolloutError = ServerUnreachable("the stream ended before all samples did")
            except grpc.aio.AioRpcError as raised:
                error = from_rpc_error(raised, endpoint=self._caller.url)
            except grpc.aio.UsageError:
                raise closed_here(self._caller.url, "Generate") from None
            except RolloutError as raised_here:
                error = raised_here
            await self._wait_before_retry(error, backoff)

    async def _connection(self) -> AsyncGenerator[Event, None]:
        """The events of one call, from where the last one broke."""
        resumed = self._seq > 0
        self._request.resume_after = self._seq
        call = self._generate(self._request, timeout=self._left_s(), metadata=self._caller.metadata)
        try:
            while (message := await self._read(call)) is not grpc.aio.EOF:
                if resumed:
                    # The process may have been replaced between the question above and this call.
                    await self._settle_instance(expected_same=message.seq != 1)
                    resumed = False
                event = self._accept(message)
                if event is not None:
                    yield event
        finally:
            call.cancel()

    async def _read(self, call: grpc.aio.UnaryStreamCall) -> generation_pb2.GenerateResponse:
        try:
            async with asyncio.timeout(self._patience.silence_s):
                message = await call.read()
        except TimeoutError:
            raise ServerUnreachable(
                f"{self._caller.url} was silent for {self._patience.silence_s:g} s, heartbeats included"
            ) from None
        self._heard_at = asyncio.get_running_loop().time()
        return message

    def _accept(self, message: generation_pb2.GenerateResponse) -> Event | None:
        event = event_from_pb(message)
        if isinstance(event, Heartbeat):
            return event
        if message.seq == 1 and self._seq:
            self._start_over("the server no longer knows the request")
        if message.seq != self._seq + 1:
            raise CorruptBytes(
                f"request {self._request.request_id}: event {message.seq} arrived, {self._seq + 1} was next"
            )
        self._seq = message.seq
        if isinstance(event, Started):
            self._instance = event.instance_id
        elif isinstance(event, SampleFinished):
            self._open_samples -= 1
        return event

    async def _settle_instance(self, *, expected_same: bool = False) -> None:
        """Asks who answers. Another instance never saw the request, so its run begins at event 1."""
        timeout_s = max(0.001, min(self._left_s(), self._patience.silence_s))
        try:
            info = await self._get_info(
                control_pb2.GetServerInfoRequest(), timeout=timeout_s, metadata=self._caller.metadata
            )
        except grpc.aio.AioRpcError as raised:
            if raised.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise ServerUnreachable(f"no answer to GetServerInfo within {timeout_s:g} s") from None
            raise
        if info.instance_id == self._instance:
            return
        self._start_over(f"instance {self._instance} of the server is gone, {info.instance_id} answers")
        if expected_same:
            raise ServerUnreachable(f"{self._caller.url} was replaced by another process")

    def _start_over(self, why: str) -> None:
        if not self._patience.restarts:
            raise ServerReplaced(f"request {self._request.request_id} at {self._caller.url}: {why}")
        log.warning("request %s starts over at %s: %s", self._request.request_id, self._caller.url, why)
        self._seq, self._open_samples = 0, self._request.num_samples

    def _left_s(self) -> float:
        return self._deadline - asyncio.get_running_loop().time()

    async def _wait_before_retry(self, error: RolloutError, backoff: Backoff) -> None:
        """Returns when the next attempt is due; raises where there is none."""
        left = self._left_s()
        if error.code is grpc.StatusCode.DEADLINE_EXCEEDED or left <= 0:
            raise self._too_late(error)
        lost = isinstance(error, ServerReplaced) or (self._seq and not self._request.HasField("detach_grace"))
        if lost or not error.retried:
            raise error
        now = asyncio.get_running_loop().time()
        if not isinstance(error, ServerUnreachable):
            self._heard_at = now  # it refuses, so it is there
        elif now - self._heard_at > self._patience.unreachable_s:
            raise unreachable(self._caller.url, "Generate", now - self._heard_at, error)
        wait = backoff.next_s(error.retry_after_s)
        if wait >= left:
            raise self._too_late(error)
        await asyncio.sleep(wait)

    def _too_late(self, last: RolloutError) -> RolloutError:
        if isinstance(last, ServerUnreachable):
            return unreachable(self._caller.url, "Generate", self._patience.timeout_s, last)
        r = self._request
        return DeadlineExceeded(
            f"request {r.request_id} did not finish within {self._patience.timeout_s:g} s at {self._caller.url}: "
            f"{r.num_samples - self._open_samples} of {r.num_samples} samples ended (last: {last.message})"
        )
