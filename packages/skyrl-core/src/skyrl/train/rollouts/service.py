"""Where rollouts come from during a run: servers found by url or started, connected, and given the policy's weights."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from skyrl_rollout.errors import DeadlineExceeded
from skyrl_rollout.pool import RolloutPool
from skyrl_rollout.weights.publisher import PublishReport, PublishTarget

from skyrl.train.launch.server import ServerProcess
from skyrl.train.rollouts.watch import ServerWatch, WatchedPool

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
CONTROL_TIMEOUT_S = 30.0


class PublishesWeights(Protocol):
    """What is needed of a `policy.group.PolicyGroup`."""

    def publish(
        self, targets: Sequence[PublishTarget], *, target_version: int, dtype: str | None, timeout_s: float
    ) -> PublishReport: ...


class RolloutService:
    """The rollout servers of one run. Made by `open`; `close` ends whatever `open` started.

    `pool` samples from them. `version` is the version published last, 0 before the first publish; `version_of_step`
    maps each published step to its version, since servers count versions and trainers count steps.
    """

    def __init__(
        self, cfg: Any, processes: Sequence[ServerProcess], pool: WatchedPool, watch: ServerWatch, epoch: int
    ) -> None:
        self.pool = pool
        self.epoch = epoch
        self.version = 0
        self.version_of_step: dict[int, int] = {}
        self._publish_timeout_s = cfg.generator.inference_engine.publish_timeout_s
        self._processes = tuple(processes)
        self._watch = watch

    @classmethod
    async def open(
        cls, cfg: Any, model_path: str | Path, *, on_wait: Callable[[str], None] = lambda what: None
    ) -> RolloutService:
        """Connects to `generator.inference_engine.external_server_urls`, else starts `num_engines` servers of
        `model_path`; takes control of all. `on_wait` is told what is waited for.

        Raises ServerUnreachable for a dead endpoint (within 10 s), ValueError for a wrong one, and what
        `ServerProcess.start` raises. Nothing is left running then.
        """
        urls = list(cfg.generator.inference_engine.external_server_urls or ())
        processes = [] if urls else await start_servers(cfg, str(model_path), on_wait)
        pool: RolloutPool | None = None
        watch: ServerWatch | None = None
        try:
            on_wait("the connection to " + ", ".join(urls or [p.url for p in processes]))
            pool = await RolloutPool.connect(urls or [p.url for p in processes], timeout_s=CONNECT_TIMEOUT_S)
            watch = ServerWatch(processes, () if processes else pool.clients)
            owner = f"{cfg.trainer.run_name}@{socket.gethostname()}:{os.getpid()}"
            epoch = await pool.acquire_control(owner, timeout_s=CONTROL_TIMEOUT_S)
            return cls(cfg, processes, WatchedPool(pool.clients, watch), watch, epoch)
        except BaseException:
            await _close(processes, pool, watch)
            raise

    def server_alive_or_raise(self) -> None:
        """Raises ServerDied, with the server's last lines, if one of them is gone."""
        self._watch.raise_if_gone()

    async def publish(self, policy: PublishesWeights, *, step: int | None = None) -> PublishReport:
        """Makes every server serve the policy's weights, as the highest version of any server plus one.

        On return no new request can get older weights. Raises what `WeightPublisher.publish` raises, or ServerDied.
        """
        self._watch.raise_if_gone()
        try:
            report = await self._watch.guard(self._publish(policy))
        except DeadlineExceeded as error:
            key = "generator.inference_engine.publish_timeout_s"
            raise DeadlineExceeded(f"{error.message} ({key}={self._publish_timeout_s:g})") from error
        except MemoryError as error:
            raise MemoryError(f"{error} (generator.inference_engine.weight_sync_backend=inline)") from error
        self.version = report.target_version
        if step is not None:
            self.version_of_step[step] = self.version
        return report

    async def _publish(self, policy: PublishesWeights) -> PublishReport:
        """In a thread of its own: exporting and copying weights would hold up the event loop."""
        await self.pool.refresh(timeout_s=CONTROL_TIMEOUT_S)
        dtypes = {client.info.model.dtype for client in self.pool.clients}
        if len(dtypes) != 1:
            raise ValueError(
                f"the rollout servers take weights in different dtypes ({', '.join(sorted(dtypes))}): "
                "start them all with the same one"
            )
        report = await asyncio.to_thread(
            policy.publish,
            [PublishTarget(client.url, self.epoch) for client in self.pool.clients],
            target_version=self.pool.highest_version() + 1,
            dtype=dtypes.pop(),
            timeout_s=self._publish_timeout_s,
        )
        await self.pool.refresh(timeout_s=CONTROL_TIMEOUT_S)
        return report

    async def close(self) -> None:
        """Ends the connections, and the servers that `open` started."""
        await _close(self._processes, self.pool, self._watch)


async def start_servers(cfg: Any, model_path: str, on_wait: Callable[[str], None]) -> list[ServerProcess]:
    """`num_engines` servers, started at the same time; if one fails the others are stopped."""
    starting = [
        asyncio.to_thread(ServerProcess.start, cfg, model_path, on_wait=on_wait)
        for _ in range(cfg.generator.inference_engine.num_engines)
    ]
    results = await asyncio.gather(*starting, return_exceptions=True)
    started = [r for r in results if isinstance(r, ServerProcess)]
    failures = [r for r in results if isinstance(r, BaseException)]
    if failures:
        await _close(started, None, None)
        raise failures[0]
    return started


async def _close(processes: Sequence[ServerProcess], pool: RolloutPool | None, watch: ServerWatch | None) -> None:
    """Each part is ended whatever happens to the others."""
    ending = [asyncio.to_thread(process.stop) for process in processes]
    if watch is not None:
        await watch.close()  # first: a server that we stop is no server that died
    if pool is not None:
        ending.insert(0, pool.close())
    for result in await asyncio.gather(*ending, return_exceptions=True):
        if isinstance(result, BaseException):
            log.warning("closing the rollout service: %s", result)
