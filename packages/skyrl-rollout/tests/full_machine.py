"""Run in a mount namespace of its own, where a disk or the shared memory is small: what happens when it is full.

usage: unshare -m python full_machine.py disk|shm FOLDER
Prints one JSON object. Requests run through all of it, and their tokens are counted.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from skyrl_rollout.client import RolloutClient
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.tokens import LogprobMode, Sampling
from skyrl_rollout.weights.publisher import PublishTarget, WeightPublisher
from test_publisher import served, weights

CANARY = ("--logits", "canary", "--vocab-size", "50000")  # 3.4 MB of weights
SMALL = "size=8m"
SHM = Path("/dev/shm")
TOKENS, PACE_S = 100, 0.004


class Publishes:
    """One trainer and one server; what each publish came to."""

    def __init__(self, client: RolloutClient, epoch: int) -> None:
        self.client, self._target = client, PublishTarget(client.url, epoch)

    async def by(self, publisher: WeightPublisher, token: int) -> dict[str, Any]:
        layout, info = self.client.info.model.tensors, await self.client.refresh()
        try:
            report = await publisher.publish(
                layout, weights(layout, token), [self._target],
                target_version=info.weight_version + 1, timeout_s=20,
            )  # fmt: skip
            said = report.transports[self.client.url]
        except (OSError, MemoryError) as error:
            said = f"{type(error).__name__}: {error}"
        status = await self.client.status()
        return {
            "said": said, "served": await served(self.client),
            "state": status.state, "open": status.open_update_id,
        }  # fmt: skip


@asynccontextmanager
async def serving(facts: dict[str, Any], *flags: str) -> AsyncIterator[Publishes]:
    """While it is open there is always a request that runs; what became of them goes into `facts`."""
    with ReferenceServer(*CANARY, *flags) as server:
        async with await RolloutClient.connect(server.url) as client:
            done = asyncio.Event()
            asking = asyncio.create_task(traffic(client, done))
            yield Publishes(client, await client.acquire_control("trainer"))
            done.set()
            facts["lengths"], facts["restarts"] = await asking


async def traffic(client: RolloutClient, done: asyncio.Event) -> tuple[list[int], int]:
    """(different numbers of tokens that came, restarts); a failure is raised."""
    asked, paced = Sampling(max_tokens=TOKENS, ignore_eos=True), {"token_delay_s": PACE_S}
    lengths, restarts = set(), 0
    while not done.is_set():
        made = await client.generate([1], asked, mode=LogprobMode.RAW, timeout_s=20, backend_options=paced)
        lengths.add(len(made.samples[0].token_ids))
        restarts += made.num_restarts
    return sorted(lengths), restarts


def mount(place: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", SMALL, "tmpfs", str(place)], check=True)


def fill(place: Path) -> Path:
    """All but half a megabyte is taken."""
    filler = place / "filler"
    with filler.open("wb") as file:
        try:
            while True:
                file.write(bytes(1 << 19))
                file.flush()
        except OSError:
            pass
    with filler.open("r+b") as file:
        file.truncate(max(0, filler.stat().st_size - (1 << 19)))
    return filler


async def disk(folder: Path) -> dict[str, Any]:
    """The root of file updates fills up, and is emptied again."""
    mount(folder)
    facts: dict[str, Any] = {}
    async with serving(facts, "--update-root", str(folder)) as publishes:
        publisher = WeightPublisher("file", folder=folder)
        facts["room"] = await publishes.by(publisher, 11)
        filler = fill(folder)
        facts["full"] = await publishes.by(publisher, 22)
        facts["left"] = [name for name in os.listdir(folder) if name != filler.name]
        filler.unlink()
        facts["again"] = await publishes.by(publisher, 33)
    return facts


async def shm(folder: Path) -> dict[str, Any]:
    """/dev/shm fills up: under a trainer that has its segment, and under one that has none."""
    mount(SHM)
    facts: dict[str, Any] = {}
    async with serving(facts) as publishes:
        has, wants, insists = WeightPublisher(), WeightPublisher(), WeightPublisher("shm")
        facts["room"] = await publishes.by(has, 11)
        fill(SHM)
        facts["kept"] = await publishes.by(has, 22)
        facts["falls back"] = await publishes.by(wants, 33)
        facts["insists"] = await publishes.by(insists, 44)
        for publisher in (has, wants, insists):
            publisher.close()
        facts["left"] = [name for name in os.listdir(SHM) if name != "filler"]
    return facts


SCENARIOS: dict[str, Callable[[Path], Any]] = {f.__name__: f for f in (disk, shm)}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(SCENARIOS[sys.argv[1]](Path(sys.argv[2])))), flush=True)
