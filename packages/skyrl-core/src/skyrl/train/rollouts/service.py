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
from skyrl_rollout.weights.publisher import PublishReport, PublishTarget

from skyrl.train.launch.server import ServerProcess
from skyrl.train.rollouts.adapters import policy_of, require_adapters
from skyrl.train.rollouts.ends import without_end
from skyrl.train.rollouts.fleet import CatchesUp, Fleet
from skyrl.train.rollouts.members import UrlFile, server_urls, url_file
from skyrl.train.rollouts.watch import ServerWatch, WatchedPool

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
CONTROL_TIMEOUT_S = 30.0


class PublishesWeights(CatchesUp, Protocol):
    """What is needed of a `policy.group.PolicyGroup`."""

    def publish(
        self, targets: Sequence[PublishTarget], *, target_version: int, dtype: str | None, timeout_s: float
    ) -> PublishReport: ...

    def publish_adapter(
        self, targets: Sequence[PublishTarget], *, target_version: int, dtype: str | None, timeout_s: float
    ) -> PublishReport: ...


class RolloutService:
    """The rollout servers of one run. Made by `open`; `close` ends whatever `open` started.

    `pool` samples from them. `version` is the version published last, 0 before the first publish; `version_of_step`
    maps each published step to its version, since servers count versions and trainers count steps. The run goes on
    while one server is left: one that misses a publish, restarts or joins gets the weights before it serves.

    A run that trains an adapter publishes its base weights once and the adapter at every step; `pool` samples from the
    adapter, and versions are the adapter's.
    """

    def __init__(self, cfg: Any, processes: Sequence[ServerProcess], fleet: Fleet | None, pool: WatchedPool) -> None:
        self.pool = pool
        self.version = 0
        self._base_version = 0  # of the weights under an adapter
        self.version_of_step: dict[int, int] = {}
        self._publish_timeout_s = cfg.generator.inference_engine.publish_timeout_s
        self._processes = tuple(processes)
        self._watch, self._fleet = pool.watch, fleet
        self._num_missed = 0

    @classmethod
    async def open(
        cls,
        cfg: Any,
        model_path: str | Path,
        *,
        on_wait: Callable[[str], None] = lambda what: None,
        control: bool = True,
    ) -> RolloutService:
        """Connects to `generator.inference_engine.external_server_urls`, else starts `num_servers` servers of
        `model_path`; takes control of all, or of none where nothing will be published. `on_wait` is told what is waited
        for.

        Raises ServerUnreachable for a dead endpoint (within 10 s), ValueError for a wrong one, and what
        `ServerProcess.start` raises. Nothing is left running then.
        """
        configured = cfg.generator.inference_engine.external_server_urls
        file = url_file(configured)
        urls = server_urls(configured)
        processes = [] if urls else await start_servers(cfg, str(model_path), on_wait)
        urls = urls or [p.url for p in processes]
        pool: WatchedPool | None = None
        try:
            on_wait("the connection to " + ", ".join(urls))
            pool = await WatchedPool.connect(urls, timeout_s=CONNECT_TIMEOUT_S)
            pool.watch, pool.policy_id = ServerWatch(processes, pool), policy_of(cfg)
            if pool.policy_id:
                require_adapters([client.info for client in pool.clients], cfg.trainer.policy.model.lora.rank)
            if (told := without_end(cfg, pool.clients[0].info.model.eos_token_ids)) is not None:
                log.warning("%s", told)
            if not control:
                return cls(cfg, processes, None, pool)
            owner = f"{cfg.trainer.run_name}@{socket.gethostname()}:{os.getpid()}"
            epoch = await pool.acquire_control(owner, timeout_s=CONTROL_TIMEOUT_S)
            followed = UrlFile(file, urls) if file is not None else None
            fleet = Fleet(
                pool,
                owner,
                epoch,
                url_file=followed,
                retain_kv=retains_kv(cfg),
                needs_adapters=bool(pool.policy_id),
            )
            return cls(cfg, processes, fleet, pool)
        except BaseException:
            await _close(processes, pool, None)
            raise

    def server_alive_or_raise(self) -> None:
        """Raises ServerDied, with the last server's last lines, if none of them is left."""
        self._watch.raise_if_gone()

    async def publish(self, policy: PublishesWeights, *, step: int | None = None) -> PublishReport:
        """Makes every server serve the policy's weights, as the highest version of any server plus one.

        On return no new request can get older weights: a server that failed (`report.failed`, the log and the metrics
        name it) is STALE and gets no request until it has caught up. Raises what `WeightPublisher.publish` raises, or
        ServerDied.
        """
        self._watch.raise_if_gone()
        assert self._fleet is not None, "opened without control: nothing can be published"
        try:
            async with self._fleet.lock:
                report = await self._watch.guard(self._publish(policy, self._fleet))
        except DeadlineExceeded as error:
            key = "generator.inference_engine.publish_timeout_s"
            raise DeadlineExceeded(f"{error.message} ({key}={self._publish_timeout_s:g})") from error
        except MemoryError as error:
            raise MemoryError(f"{error} (generator.inference_engine.weight_sync_backend=inline)") from error
        self.version = report.target_version
        missed = [r for r in self.pool.replicas if r.url not in report.committed]
        for r in missed:
            why = report.failed.get(r.url) or r.why_away or "it is not under this run's control"
            log.error("%s missed version %d and gets no work until it has it: %s", r.url, self.version, why)
        self._num_missed = len(missed)
        self._fleet.tend(policy)
        if step is not None:
            self.version_of_step[step] = self.version
        return report

    async def _publish(self, policy: PublishesWeights, fleet: Fleet) -> PublishReport:
        """The weights, or the adapter over them: those are published first, and where no server has them any more."""
        await self.pool.refresh(timeout_s=CONTROL_TIMEOUT_S)
        targets = await fleet.targets()
        if not self.pool.policy_id:
            return await self._send(policy.publish, targets)
        ready = self._with_base(targets)
        if not ready:
            self._base_version = (await self._send(policy.publish, targets)).target_version
            ready = self._with_base(targets)
        return await self._send(policy.publish_adapter, ready, self.pool.policy_id)

    async def _send(
        self, publish: Callable[..., PublishReport], targets: Sequence[PublishTarget], policy_id: str = ""
    ) -> PublishReport:
        """In a thread of its own: exporting and copying weights would hold up the event loop."""
        dtypes = {client.info.model.dtype for client in self.pool.clients}
        if len(dtypes) != 1:
            raise ValueError(
                f"the rollout servers take weights in different dtypes ({', '.join(sorted(dtypes))}): "
                "start them all with the same one"
            )
        # one count for base and adapter, since servers remember the versions of adapters that a new base dropped; our
        # own last one too: a server that had it may have restarted, and a version is published once
        served = [version for r in self.pool.replicas for version in r.versions.values()]
        report = await asyncio.to_thread(
            publish,
            targets,
            target_version=max(self.version, self._base_version, *served) + 1,
            dtype=dtypes.pop(),
            timeout_s=self._publish_timeout_s,
        )
        self.pool.expect(report.target_version, policy_id)
        await self.pool.refresh(timeout_s=CONTROL_TIMEOUT_S)
        return report

    def _with_base(self, targets: Sequence[PublishTarget]) -> list[PublishTarget]:
        """Those that serve this run's base weights; the others catch up, with the adapter, before they serve."""
        serving = {r.url for r in self.pool.replicas if self._base_version and r.version == self._base_version}
        return [t for t in targets if t.url in serving]

    def metrics(self) -> dict[str, float]:
        """Servers that serve and that do not; samples that moved or were made again since the run began."""
        replicas, stale = self.pool.replicas, self.pool.stale()
        return {
            "rollouts/num_servers": float(len(replicas)),
            "rollouts/num_servers_away": float(sum(r.away_since is not None for r in replicas)),
            "rollouts/num_servers_stale": float(len(stale)),
            "rollouts/num_servers_missed_publish": float(self._num_missed),
            "rollouts/num_catch_ups": float(self._fleet.num_catch_ups if self._fleet else 0),
            "rollouts/num_moved_samples": float(self.pool.num_moves),
            "rollouts/num_kept_tokens": float(self.pool.num_kept_tokens),
            "rollouts/num_restarted_runs": float(self.pool.num_restarts),
        }

    async def close(self) -> None:
        """Ends the connections, and the servers that `open` started."""
        await _close(self._processes, self.pool, self._fleet)


def retains_kv(cfg: Any) -> bool:
    """Whether samples that run over a publish keep the KV of the old weights; else they make it anew."""
    trainer = cfg.trainer
    return trainer.mode == "fully_async" and not trainer.fully_async.clear_kv_cache_on_weight_sync


async def start_servers(cfg: Any, model_path: str, on_wait: Callable[[str], None]) -> list[ServerProcess]:
    """`num_servers` servers, started at the same time; if one fails the others are stopped."""
    starting = [
        asyncio.to_thread(ServerProcess.start, cfg, model_path, on_wait=on_wait)
        for _ in range(cfg.generator.inference_engine.num_servers)
    ]
    results = await asyncio.gather(*starting, return_exceptions=True)
    started = [r for r in results if isinstance(r, ServerProcess)]
    failures = [r for r in results if isinstance(r, BaseException)]
    if failures:
        await _close(started, None, None)
        raise failures[0]
    return started


async def _close(processes: Sequence[ServerProcess], pool: WatchedPool | None, fleet: Fleet | None) -> None:
    """Each part is ended whatever happens to the others."""
    ending = [asyncio.to_thread(process.stop) for process in processes]
    if fleet is not None:
        await fleet.close()
    if pool is not None:
        if hasattr(pool, "watch"):
            await pool.watch.close()  # first: a server that we stop is no server that died
        ending.insert(0, pool.close())
    for result in await asyncio.gather(*ending, return_exceptions=True):
        if isinstance(result, BaseException):
            log.warning("closing the rollout service: %s", result)
