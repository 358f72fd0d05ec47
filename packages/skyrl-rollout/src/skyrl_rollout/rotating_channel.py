"""A connection that outlives its certificates: new calls go over a new one as soon as the credential files change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

log = logging.getLogger(__name__)

RETIRED_FOR_S = 3600.0  # calls that began on the connection before go on there for so long


class RotatingChannel(grpc.aio.Channel):
    """dial: opens a channel with the files as they are now; OSError or ValueError keeps the present one. stamp: changes
    when the files do."""

    def __init__(self, dial: Callable[[], grpc.aio.Channel], stamp: Callable[[], object]) -> None:
        self._dial, self._stamp = dial, stamp
        self._seen = stamp()
        self._channel = dial()
        self._retired: dict[asyncio.TimerHandle, grpc.aio.Channel] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def _current(self) -> grpc.aio.Channel:
        now = self._stamp()
        if now != self._seen:
            try:
                opened = self._dial()
            except (OSError, ValueError) as error:
                log.warning("the credential files cannot be used yet, the connection stays as it is: %s", error)
            else:
                self._retire(self._channel)
                self._channel = opened
            self._seen = now
        return self._channel

    def _retire(self, channel: grpc.aio.Channel) -> None:
        def end() -> None:
            self._retired.pop(timer, None)
            task = asyncio.ensure_future(channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

        timer = asyncio.get_running_loop().call_later(RETIRED_FOR_S, end)
        self._retired[timer] = channel

    def _callable(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made: tuple[Any, Any] = (None, None)

        def call(*call_args: Any, **call_kwargs: Any) -> Any:
            nonlocal made
            channel = self._current()
            if made[0] is not channel:
                made = channel, getattr(channel, kind)(*args, **kwargs)
            return made[1](*call_args, **call_kwargs)

        return call

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._callable("unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._callable("unary_stream", args, kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._callable("stream_unary", args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._callable("stream_stream", args, kwargs)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._current().channel_ready()

    async def close(self, grace: float | None = None) -> None:
        """Ends every connection, those that only finish old calls too."""
        for timer in self._retired:
            timer.cancel()
        retired, self._retired = list(self._retired.values()), {}
        await asyncio.gather(*(channel.close(grace) for channel in (*retired, self._channel)))

    async def __aenter__(self) -> RotatingChannel:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
