"""One replica of a pool as its callers know it: whether it is there, what it serves, and how much work it has."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from skyrl_rollout.calls import Backoff
from skyrl_rollout.client import CALL_TIMEOUT_S, RolloutClient
from skyrl_rollout.errors import RolloutError, ServerUnreachable
from skyrl_rollout.status import ServerStatus

log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 1.0
SILENCE_S = 5.0  # without a report for so long a replica is away: it gets no new work while there are others
FAILOVER_S = 10.0  # away for so long, its work goes on elsewhere
_TAKES_WORK = ("serving", "pausing", "paused", "committing", "unknown")


class Replica:
    """Watches the server behind `client` until `close`; belongs to the event loop it is made on.

    versions: the committed one of every policy, as last reported; version: that of the base. instance_id: the process
    that answers. away_since: None, or since when (monotonic seconds) nothing is heard of it. is_leaving: it gets no new
    work. num_samples: how many samples of ours it is making.
    """

    def __init__(self, client: RolloutClient, on_change: Callable[[], None]) -> None:
        self.client = client
        self.url = client.url
        self.instance_id = client.info.instance_id
        self.versions = dict(client.info.weight_versions)
        self.state = "serving"
        self.away_since: float | None = None
        self.why_away = ""
        self.is_leaving = False
        self.num_samples = 0
        self.num_assigned = 0
        self._others = 0  # requests of other callers, by the last report
        self._on_change = on_change
        self._runs: dict[asyncio.Task[None], str] = {}  # -> why it was given up, "" while it runs
        self._watching = asyncio.get_running_loop().create_task(self._watch(), name=f"watch {self.url}")

    @property
    def version(self) -> int:
        return self.versions.get("", 0)

    @property
    def takes_work(self) -> bool:
        return not self.is_leaving and self.away_since is None and self.state in _TAKES_WORK

    @property
    def load(self) -> int:
        """Samples of ours that it makes and requests of others that run or wait there."""
        return self.num_samples + self._others

    @property
    def away_s(self) -> float:
        """How long nothing has been heard of it; 0 while it reports."""
        return 0.0 if self.away_since is None else time.monotonic() - self.away_since

    async def carry(self, work: Coroutine[Any, Any, None], num_samples: int) -> None:
        """Awaits `work`, which asks this replica for samples. Raises ServerUnreachable when it is given up."""
        task = asyncio.ensure_future(work)
        self._runs[task] = ""
        self.num_samples += num_samples
        self.num_assigned += num_samples
        try:
            await task
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if self._runs[task] and not (me and me.cancelling()):
                raise ServerUnreachable(f"{self.url}: {self._runs[task]}") from None
            raise
        finally:
            del self._runs[task]
            self.num_samples -= num_samples

    def give_up(self, why: str) -> None:
        """Ends all work that it carries with ServerUnreachable, so that it goes on elsewhere."""
        for task in self._runs:
            self._runs[task] = why
            task.cancel()

    def suspect(self, why: str) -> None:
        """Takes it for away until its next report."""
        if self.away_since is None:
            self.away_since, self.why_away = time.monotonic(), why
            log.warning("%s is away: %s", self.url, why)
            self._on_change()

    async def is_ending(self) -> bool:
        """Whether it is on its way out, so that what it aborts is not the caller's wish."""
        if self.state == "draining" or self.away_since is not None:
            return True
        try:
            return (await self.client.status(timeout_s=2.0)).state == "draining"
        except RolloutError:
            return True

    async def look(self, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Asks who answers and what it serves. Raises ServerUnreachable, DeadlineExceeded."""
        info = await self.client.refresh(timeout_s=timeout_s)
        self._is_heard(info.instance_id, info.weight_versions)

    async def close(self) -> None:
        self._watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._watching
        await self.client.close()

    async def _watch(self) -> None:
        backoff = Backoff(most_s=1.0)
        while True:
            try:
                async with contextlib.aclosing(
                    self.client.watch_status(WATCH_INTERVAL_S, silence_s=SILENCE_S)
                ) as reports:
                    async for report in reports:
                        await self._read(report)
                        backoff.reset()
                self.suspect("it ended its status reports")
            except RolloutError as error:
                self.suspect(error.message)
            if self.away_s > FAILOVER_S:
                self._on_change()
            await asyncio.sleep(backoff.next_s())

    async def _read(self, report: ServerStatus) -> None:
        if report.instance_id != self.client.info.instance_id:
            await self.client.refresh(timeout_s=SILENCE_S)
        changed = report.state != self.state
        self.state = report.state
        self._others = max(0, report.running + report.waiting + report.frozen - len(self._runs))
        self._is_heard(report.instance_id, report.weight_versions, changed=changed)

    def _is_heard(self, instance_id: str, versions: Mapping[str, int], *, changed: bool = False) -> None:
        if instance_id != self.instance_id:
            log.warning("%s: another process answers (%s, version %d)", self.url, instance_id, versions.get("", 0))
            self.instance_id, changed = instance_id, True
        if self.away_since is not None:
            log.warning("%s is back after %.1f s", self.url, self.away_s)
        if versions != self.versions or self.away_since is not None:
            changed = True
        self.versions, self.away_since, self.why_away = dict(versions), None, ""
        if changed:
            self._on_change()
