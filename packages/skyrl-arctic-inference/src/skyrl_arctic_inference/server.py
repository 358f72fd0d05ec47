"""A serving process from its settings: engine first, gRPC after, and an exit code that tells how it ended."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

from skyrl_rollout.server import ParentWatch, ServerOptions, refuse_taken_address, serve

from skyrl_arctic_inference import front_watch
from skyrl_arctic_inference.engine.identity import read_model_folder
from skyrl_arctic_inference.engine.launch import EngineStartError, start_engine
from skyrl_arctic_inference.last_lines import LastLines
from skyrl_arctic_inference.settings import ServeSettings
from skyrl_arctic_inference.socket_folder import SocketFolder

if TYPE_CHECKING:
    from skyrl_arctic_inference.engine.vllm_engine import VllmEngine

logger = logging.getLogger(__name__)
EXIT_FAILED = 1
LINES_SHOWN = 15


def run(settings: ServeSettings, options: ServerOptions) -> int:
    """Serves until SIGTERM or the parent's end; 0 after a drain, 1 when the engine did not start or died."""
    folder = read_model_folder(settings.model)
    refuse_taken_address(options)
    parent = ParentWatch.from_environment(kill_after_s=options.drain_grace_s)
    sockets = SocketFolder()
    os.environ.update(settings.environment(sockets.path))
    front_watch.name_front()
    lines = LastLines()
    _end_at_once_on_signals(sockets)
    try:
        engine, times = start_engine(settings, folder)
        return asyncio.run(_serve(engine, options, times, lines, parent, sockets))
    except EngineStartError as error:
        lines.close()
        print(f"arctic-serve: error: {error}{_because(lines)}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    finally:
        lines.close()
        sockets.close()


def _end_at_once_on_signals(sockets: SocketFolder) -> None:
    """While the engine starts there is nothing to drain, and imports swallow a KeyboardInterrupt. Serving takes the
    signals over."""
    front = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() == front:  # a forked engine process has this handler until it sets its own
            sockets.close()
        os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)


async def _serve(
    engine: VllmEngine,
    options: ServerOptions,
    times: dict[str, float],
    lines: LastLines,
    parent: ParentWatch | None,
    sockets: SocketFolder,
) -> int:
    await engine.connected()
    sockets.close()  # connected sockets need no name, so that even a killed server leaves none
    serving = asyncio.create_task(serve(engine, options, parent=parent, startup_s=times), name="serve")
    death = asyncio.create_task(engine.died(), name="engine death")
    await asyncio.wait((serving, death), return_when=asyncio.FIRST_COMPLETED)
    if not death.done():
        death.cancel()
        return await serving
    os.kill(os.getpid(), signal.SIGTERM)  # the streams have ended with UNAVAILABLE: the drain has nothing to wait for
    await serving
    shown = "".join(f"\n  {line}" for line in lines.last(LINES_SHOWN))
    lines.close()
    print(f"{shown}\narctic-serve: error: the engine process died{_because(lines)}", file=sys.stderr, flush=True)
    return EXIT_FAILED


def _because(lines: LastLines) -> str:
    cause = lines.cause()
    return f": {cause}" if cause else ""
