"""Several rollout servers as one: which replica takes a request, and who takes over when one is gone."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from skyrl_rollout.client import CALL_TIMEOUT_S, RolloutClient
from skyrl_rollout.errors import DeadlineExceeded, Draining, ServerUnreachable
from skyrl_rollout.security import Credentials
from skyrl_rollout.tokens import Generation, LogprobMode, Sampling

log = logging.getLogger(__name__)

FAILOVER_S = 10.0  # how long a replica may stay away before another takes the request
REMEMBERED_AFFINITIES = 65_536


class RolloutPool:
    """Made by `connect`. Requests of one affinity go to one replica, whose cache has their prefix; the rest, and each
    new affinity, goes to the replica with the fewest samples in flight."""

    def __init__(self, clients: Sequence[RolloutClient]) -> None:
        self.clients = tuple(clients)
        self._in_flight = [0] * len(self.clients)
        self._homes: OrderedDict[str, int] = OrderedDict()

    @classmethod
    async def connect(
        cls,
        urls: Sequence[str],
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        credentials: Credentials | None = None,
        heartbeat_s: float = 5.0,
    ) -> RolloutPool:
        """Connects to all at the same time. Raises ValueError for no url or one given twice, else what the first
        failing replica raises; nothing stays open then."""
        if not urls or len(set(urls)) != len(urls):
            raise ValueError(f"a pool needs at least one url and each only once, got {list(urls)}")
        dialled = await asyncio.gather(
            *(
                RolloutClient.connect(u, timeout_s=timeout_s, credentials=credentials, heartbeat_s=heartbeat_s)
                for u in urls
            ),
            return_exceptions=True,
        )
        failures = [d for d in dialled if isinstance(d, BaseException)]
        clients = [d for d in dialled if isinstance(d, RolloutClient)]
        if failures:
            await asyncio.gather(*(c.close() for c in clients))
            raise failures[0]
        return cls(clients)

    async def __aenter__(self) -> RolloutPool:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def acquire_control(self, owner: str, *, timeout_s: float = CALL_TIMEOUT_S) -> int:
        """One epoch for all replicas: the highest that any of them mints, claimed on each. Raises Fenced."""
        minted = await asyncio.gather(*(c.acquire_control(owner, timeout_s=timeout_s) for c in self.clients))
        highest = max(minted)
        behind = [c for c, epoch in zip(self.clients, minted, strict=True) if epoch < highest]
        await asyncio.gather(*(c.acquire_control(owner, claim_epoch=highest, timeout_s=timeout_s) for c in behind))
        return highest

    async def refresh(self, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Asks every replica for its committed versions again."""
        await asyncio.gather(*(c.refresh(timeout_s=timeout_s) for c in self.clients))

    def highest_version(self) -> int:
        """The highest committed version over the replicas, as of the last `connect` or `refresh`."""
        return max(c.info.weight_version for c in self.clients)

    async def generate(
        self,
        prompt_token_ids: Sequence[int] | np.ndarray,
        sampling: Sampling,
        *,
        mode: LogprobMode,
        timeout_s: float,
        num_samples: int = 1,
        min_weight_version: int | None = None,
        on_commit: str = "continue",
        affinity: str = "",
        on_progress: Callable[[int], None] | None = None,
    ) -> Generation:
        """`RolloutClient.generate` on the replica that `affinity` names.

        A replica that is unreachable for 10 s or drains loses the request to another one, where it starts anew; with
        one replica there is none, and the request waits for it until `timeout_s`.
        """
        loop = asyncio.get_running_loop()
        deadline, tried, request_id = loop.time() + timeout_s, set[int](), str(uuid.uuid4())
        while True:
            i = self._replica(affinity, tried)
            last = len(tried) + 1 == len(self.clients)
            left = deadline - loop.time()
            if left <= 0:
                raise DeadlineExceeded(f"request {request_id} found no replica that answers within {timeout_s:g} s")
            self._in_flight[i] += num_samples
            try:
                return await self.clients[i].generate(
                    prompt_token_ids, sampling, mode=mode, timeout_s=left, num_samples=num_samples,
                    request_id=request_id, min_weight_version=min_weight_version, on_commit=on_commit,
                    unreachable_s=None if last else FAILOVER_S, on_progress=on_progress,
                )  # fmt: skip
            except (ServerUnreachable, Draining) as error:
                if last:
                    raise
                tried.add(i)
                self._homes.pop(affinity, None)
                log.warning("request %s moves to another replica: %s", request_id, error)
            finally:
                self._in_flight[i] -= num_samples

    def _replica(self, affinity: str, tried: set[int]) -> int:
        home = self._homes.get(affinity) if affinity else None
        if home is None or home in tried:
            left = (i for i in range(len(self.clients)) if i not in tried)
            home = min(left, key=lambda i: self._in_flight[i])
        if affinity:
            self._homes[affinity] = home
            self._homes.move_to_end(affinity)
            if len(self._homes) > REMEMBERED_AFFINITIES:
                self._homes.popitem(last=False)
        return home

    async def close(self) -> None:
        await asyncio.gather(*(c.close() for c in self.clients))
