"""Bringing servers that joined or restarted under this run's control, and to its weights, while the run goes on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Protocol

from skyrl_rollout.calls import Backoff
from skyrl_rollout.errors import Fenced, RolloutError
from skyrl_rollout.pool import RolloutPool
from skyrl_rollout.replicas import Replica
from skyrl_rollout.weights.publisher import PublishReport, PublishTarget

from skyrl.train.rollouts.members import UrlFile

log = logging.getLogger(__name__)

LOOK_S = 1.0
RETRY_S = (2.0, 60.0)  # between two tries to win one server: at first, at most
CONTROL_TIMEOUT_S = 10.0
JOIN_TIMEOUT_S = 3.0  # nobody else is looked after meanwhile, and it is tried again
CATCH_UP_TIMEOUT_S = 600.0


class CatchesUp(Protocol):
    """What is needed of a `policy.group.PolicyGroup`: its publisher keeps the bytes that were published last."""

    def catch_up(self, targets: Sequence[PublishTarget], *, timeout_s: float) -> PublishReport: ...


class Tries:
    """When each server may be tried again after failures, by a key of its own."""

    def __init__(self) -> None:
        self._waits: dict[str, tuple[float, Backoff]] = {}  # key -> (not before, how the waits grow)

    def is_due(self, key: str) -> bool:
        return key not in self._waits or time.monotonic() >= self._waits[key][0]

    def failed(self, key: str) -> float:
        """The seconds until the next try is due."""
        backoff = self._waits[key][1] if key in self._waits else Backoff(*RETRY_S)
        wait_s = backoff.next_s()
        self._waits[key] = (time.monotonic() + wait_s, backoff)
        return wait_s

    def worked(self, key: str) -> None:
        self._waits.pop(key, None)


class Fleet:
    """The replicas of one run. `lock` is held while weights move; `epoch` is what all of them obey; `retain_kv`:
    samples that run over a publish keep their KV; needs_adapters: a replica that takes none gets no work."""

    def __init__(
        self,
        pool: RolloutPool,
        owner: str,
        epoch: int,
        *,
        url_file: UrlFile | None,
        retain_kv: bool = False,
        needs_adapters: bool = False,
    ) -> None:
        self.pool, self.owner, self.epoch, self.retain_kv = pool, owner, epoch, retain_kv
        self.lock = asyncio.Lock()
        self.num_catch_ups = 0
        self._url_file, self._needs_adapters = url_file, needs_adapters
        self._model = pool.clients[0].info.model.fingerprint
        self._controlled = {r.url: r.instance_id for r in pool.replicas}
        self._catching_up, self._joining = Tries(), Tries()  # by instance id, by url
        self._policy: CatchesUp | None = None
        self._task: asyncio.Task[None] | None = None

    def tend(self, policy: CatchesUp) -> None:
        """From now on, until `close`: follows the file of urls, and gives the weights that `policy` published last to
        every replica that missed them."""
        self._policy = policy
        if self._task is None:
            self._task = asyncio.create_task(self._tend(), name="rollout fleet")

    async def targets(self) -> list[PublishTarget]:
        """Who gets the next weights: every replica that answers, serves the run's model and obeys this trainer. All of
        them where none answers, so that the error names them. Raises Fenced."""
        present = [r for r in self.pool.replicas if r.away_since is None]
        ready = [r for r in present if await self._control(r)] if present else list(self.pool.replicas)
        return [PublishTarget(r.url, self.epoch, retain_kv=self.retain_kv) for r in ready]

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _tend(self) -> None:
        while True:
            try:
                await self._follow_file()
                async with self.lock:
                    for replica in self.pool.stale():
                        await self._bring_back(replica)
            except Fenced as error:
                log.error("another trainer owns the rollout servers: %s", error)
                return  # the next publish says so to the run
            except Exception:
                log.exception("looking after the rollout servers")
            await self.pool.changed(LOOK_S)
            await asyncio.sleep(0.05)

    async def _bring_back(self, replica: Replica) -> None:
        assert self._policy is not None
        instance = replica.instance_id
        if not self._catching_up.is_due(instance):
            return
        if not await self._control(replica):
            self._catching_up.failed(instance)
            return
        target = PublishTarget(replica.url, self.epoch)
        try:
            report = await asyncio.to_thread(self._policy.catch_up, [target], timeout_s=CATCH_UP_TIMEOUT_S)
            await replica.look(timeout_s=CONTROL_TIMEOUT_S)
        except (RolloutError, ValueError) as error:
            wait_s = self._catching_up.failed(instance)
            log.warning("%s is STALE and could not catch up (next try in %.0f s): %s", replica.url, wait_s, error)
            return
        self._catching_up.worked(instance)
        self.num_catch_ups += 1
        log.warning("%s caught up with version %d and serves again", replica.url, report.target_version)

    async def _control(self, replica: Replica) -> bool:
        """Whether this trainer owns the replica's process, which may be new. Raises Fenced."""
        if self._controlled.get(replica.url) == replica.instance_id:
            return True
        try:
            self.epoch = await self.pool.extend_control(replica, self.owner, self.epoch, timeout_s=CONTROL_TIMEOUT_S)
        except Fenced:
            raise
        except RolloutError as error:
            log.warning("%s cannot be brought under control: %s", replica.url, error)
            return False
        model = replica.client.info.model
        if model.fingerprint != self._model:
            log.error("%s serves another model (%s) than the run's servers: it gets no work", replica.url, model.name)
            return False
        if self._needs_adapters and not replica.client.info.capabilities.lora:
            log.error("%s takes no adapters, which this run trains: it gets no work", replica.url)
            return False
        self._controlled[replica.url] = replica.instance_id
        return True

    async def _follow_file(self) -> None:
        if self._url_file is None:
            return
        written = self._url_file.changed() is not None
        urls, known = self._url_file.urls, {r.url for r in self.pool.replicas}
        for url in [u for u in urls if u not in known and (written or self._joining.is_due(u))]:
            try:
                await self.pool.add(url, timeout_s=JOIN_TIMEOUT_S)
            except (RolloutError, ValueError) as error:
                wait_s = self._joining.failed(url)
                log.error(
                    "%s is in the file of rollout servers and did not join (next try in %.0f s): %s", url, wait_s, error
                )
            else:
                self._joining.worked(url)
        for url in [r.url for r in self.pool.replicas if r.url not in urls]:
            try:
                await self.pool.remove(url)
            except ValueError as error:
                if written:
                    log.error("%s stays, though the file of rollout servers names it no longer: %s", url, error)
                continue
            self._controlled.pop(url, None)
