"""From an engine to a serving process: builds the services over it, says that it is ready, and ends cleanly."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from skyrl_rollout.server.control import EngineService
from skyrl_rollout.server.engine import Engine
from skyrl_rollout.server.generation import RolloutService
from skyrl_rollout.server.health import SERVICES, HealthService, watch_for_wedge
from skyrl_rollout.server.lifetime import ParentWatch, drain, kill_own_group, stop_requested
from skyrl_rollout.server.logs import set_format
from skyrl_rollout.server.options import ServerOptions
from skyrl_rollout.server.parts import ServerParts, assemble
from skyrl_rollout.server.perimeter import Perimeter, check_files
from skyrl_rollout.server.scoring import Scorer
from skyrl_rollout.server.weights import WeightService
from skyrl_rollout.v1 import control_pb2_grpc, generation_pb2_grpc, weights_pb2_grpc
from skyrl_rollout.weights.shm import remove_stale

logger = logging.getLogger(__name__)
EXIT_FAILED = 1
CLOSE_S = 30.0
MAX_PENDING_CALLS = 1 << 16
LAST_CALLS_S = 0.5  # for status and health watchers, which never end by themselves

EngineFactory = Callable[[], Awaitable[Engine]]


async def serve(
    engine: Engine | EngineFactory,
    options: ServerOptions,
    *,
    parent: ParentWatch | None = None,
    startup_s: Mapping[str, float] | None = None,
) -> int:
    """Serves until SIGTERM, SIGINT or the parent's end, and returns the exit code.

    The engine is built before gRPC starts, because an engine may fork and a forked gRPC deadlocks. An address that is
    taken is reported in one line before the engine is built. A caller that built its engine beforehand may have called
    `refuse_taken_address` and may hand over the `parent` watch it started; `startup_s` has the seconds of its phases,
    which the ready line shows. Raises ValueError for a token or TLS file that cannot be used.
    """
    began = time.monotonic()
    if options.log_format is not None:
        set_format(options.log_format)
    parent = parent or ParentWatch.from_environment(kill_after_s=options.drain_grace_s)
    stopping = stop_requested()
    try:
        refuse_taken_address(options)
        built = engine if not callable(engine) else await _unless_stopped(engine(), stopping)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    if built is None:
        return 0
    try:
        return await _serve(built, options, stopping, parent, (began, startup_s or {}))
    finally:
        await _close(built)
        if parent is not None and parent.is_gone:
            remove_stale()  # the weights of a trainer that was killed would stay in memory
            kill_own_group()


async def _serve(
    engine: Engine,
    options: ServerOptions,
    stopping: asyncio.Future[str],
    parent: ParentWatch | None,
    started: tuple[float, Mapping[str, float]],
) -> int:
    began, phases_s = started
    parts = assemble(engine, options)
    state = parts.state
    perimeter = Perimeter(parts)
    server = _server(parts, perimeter)
    try:
        url = _bind(server, options, perimeter)
        more = perimeter.open()
    except (RuntimeError, OSError) as error:
        print(f"error: cannot listen: {error}; choose another address", file=sys.stderr, flush=True)
        return EXIT_FAILED
    await server.start()
    watchdog = asyncio.create_task(watch_for_wedge(engine, state, options.wedged_after_s))
    if parent is not None:
        loop = asyncio.get_running_loop()
        parent.call_when_gone(partial(_resolve_from_thread, loop, stopping, "parent gone"))
    _spare_the_collector()
    phases = dict(phases_s) | {"grpc": time.monotonic() - began} if phases_s else {}
    total = sum(phases.values()) or time.monotonic() - began
    print(
        f"ready url={url} instance={state.instance_id} model={engine.identity.name} version={state.weight_version} "
        f"startup_s={total:.1f}" + "".join(f" {name}_s={seconds:.1f}" for name, seconds in phases.items()) + more,
        flush=True,
    )
    reason = await stopping
    logger.info("stopping: %s", reason)
    await drain(parts.runs, parts.updater, state, options.drain_grace_s)
    await server.stop(LAST_CALLS_S)
    watchdog.cancel()
    with suppress(asyncio.CancelledError):
        await watchdog
    await perimeter.close()
    if options.unix_path is not None:
        options.unix_path.unlink(missing_ok=True)
    return 0


def _spare_the_collector() -> None:
    """Modules and weights are there until the end: looking through them again stops every stream for 0.1 to 0.5 s."""
    gc.collect()
    gc.freeze()


def _server(parts: ServerParts, perimeter: Perimeter) -> grpc.aio.Server:
    options = parts.options
    server = grpc.aio.server(options=_channel_options(options), interceptors=perimeter.interceptors())
    generation_pb2_grpc.add_RolloutServiceServicer_to_server(_rollout(parts), server)
    control_pb2_grpc.add_EngineServiceServicer_to_server(EngineService(parts), server)
    weights_pb2_grpc.add_WeightServiceServicer_to_server(WeightService(parts), server)
    health_pb2_grpc.add_HealthServicer_to_server(HealthService(parts.state), server)
    if options.is_local:
        health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        reflection.enable_server_reflection((*SERVICES, health_name, reflection.SERVICE_NAME), server)
    return server


def _rollout(parts: ServerParts) -> RolloutService:
    return RolloutService(parts.runs, Scorer(parts.engine, parts.state, parts.runs, parts.options))


def _channel_options(options: ServerOptions) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),  # a second server on the port is an error, not a coin toss per connection
        ("grpc.max_receive_message_length", options.max_message_bytes),
        ("grpc.max_send_message_length", options.max_message_bytes),
        # a call may be silent for minutes while its client pings
        ("grpc.http2.min_ping_interval_without_data_ms", options.keepalive_min_interval_ms),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        # calls that wait for their handler: beyond these gRPC itself cancels them, without a reason
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
    ]


def _bind(server: grpc.aio.Server, options: ServerOptions, perimeter: Perimeter) -> str:
    """Binds the address and returns the url under which clients find it."""
    address = options.listen
    if options.unix_path is not None:
        address = f"unix:{options.unix_path}"
    if perimeter.certificates is not None:
        port, scheme = server.add_secure_port(address, perimeter.certificates.credentials()), "grpcs"
    else:
        port, scheme = server.add_insecure_port(address), "grpc"
    if options.unix_path is not None:
        return f"unix://{options.unix_path.absolute()}"
    return f"{scheme}://{options.listen.rpartition(':')[0]}:{port}"


def refuse_taken_address(options: ServerOptions) -> None:
    """Raises OSError when another process listens there, ValueError for token or TLS files that cannot be used; removes
    a socket file that nobody listens on."""
    check_files(options)
    path = options.unix_path
    if path is not None:
        if not path.parent.is_dir():
            raise OSError(f"--listen {options.listen}: there is no folder {path.parent}")
        if path.exists() and not path.is_socket():
            raise OSError(f"--listen {options.listen}: {path} is there and is no socket: choose another path")
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise OSError(f"--listen {options.listen} is in use by another process: choose another path")
        path.unlink(missing_ok=True)
        return
    host, port = options.host_port
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise OSError(f"--listen {options.listen}: {error.strerror}; choose another port, or port 0") from None


async def _unless_stopped(building: Awaitable[Engine], stopping: asyncio.Future[str]) -> Engine | None:
    """The built engine, or None when a signal came first."""
    task = asyncio.ensure_future(building)
    await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        return task.result()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    return None


async def _close(engine: Engine) -> None:
    try:
        await asyncio.wait_for(engine.close(), CLOSE_S)
    except TimeoutError:
        logger.error("the engine did not close within %.0f s: its processes are killed with this one", CLOSE_S)
        kill_own_group()


def _resolve_from_thread(loop: asyncio.AbstractEventLoop, future: asyncio.Future[str], reason: str) -> None:
    with suppress(RuntimeError):  # the loop is closed: the server has stopped already
        loop.call_soon_threadsafe(_resolve, future, reason)


def _resolve(future: asyncio.Future[str], reason: str) -> None:
    if not future.done():
        future.set_result(reason)
