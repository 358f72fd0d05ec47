"""A trainer in a process of its own, which says what it holds and then waits to be killed, stopped or told to go on.

usage: python trainer_process.py holds|publishes|commits URL
holds: when a line comes it takes a pause and an open update that is half uploaded, each under LEASE_S.
publishes: it has copied the weights of version 2 and sends them when a line comes.
commits: its version 2 is sealed, and when a line comes it tries to commit, pause and sleep.
It prints a line whenever it has come so far.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from types import SimpleNamespace

from google.protobuf.duration_pb2 import Duration
from raw_calls import RawCalls, fence, raw_calls, refused
from raw_updates import begin, chunk, commit, draft, forcing, send, staged, version
from skyrl_rollout.channel import parse_url
from skyrl_rollout.client import RolloutClient
from skyrl_rollout.v1 import control_pb2
from skyrl_rollout.weights.publisher import PublishTarget, WeightPublisher

LEASE_S = 1.2
TOKEN = 60  # what the weights of a trainer that was replaced would make the server say


async def holds(calls: RawCalls, url: str) -> None:
    epoch, lease = await calls.epoch("doomed"), Duration()
    lease.FromNanoseconds(int(LEASE_S * 1e9))
    d = draft(await version(calls) + 1, forcing(TOKEN))
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await begin(calls, epoch, d, lease=lease)
    await send(calls, chunk(d, 0, len(d.shard) // 2))
    pause = control_pb2.PauseRequest(fence=fence(epoch), mode=control_pb2.PAUSE_MODE_KEEP, lease=lease)
    await calls.engine.Pause(pause, timeout=5)
    print(d.update_id, flush=True)
    await asyncio.sleep(60)


async def publishes(calls: RawCalls, url: str) -> None:
    async with await RolloutClient.connect(url) as client:
        epoch = await client.acquire_control("zombie")
        layout = client.info.model.tensors
        canary = forcing(TOKEN)

        def tensors() -> Iterator[tuple[str, memoryview]]:
            for t in layout:
                yield t.name, memoryview(canary.get(t.name, bytes(t.nbytes)))
            print("copied", flush=True)
            sys.stdin.readline()

        target = PublishTarget(url, epoch)
        await WeightPublisher().publish(layout, tensors(), [target], target_version=2, timeout_s=60)


async def commits(calls: RawCalls, url: str) -> None:
    epoch = await calls.epoch("zombie")
    d = await staged(calls, epoch, draft(await version(calls) + 1, forcing(TOKEN)))
    print(d.update_id, flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    first = await refused(commit(calls, epoch, d.update_id, 1))
    pause = control_pb2.PauseRequest(fence=fence(epoch), mode=control_pb2.PAUSE_MODE_KEEP)
    sleep = control_pb2.SleepRequest(fence=fence(epoch), level=control_pb2.SleepRequest.LEVEL_DISCARD)
    later = [await refused(calls.engine.Pause(pause, timeout=5)), await refused(calls.engine.Sleep(sleep, timeout=5))]
    print(" ".join(f"{e.code.name}/{e.reason}" for e in (first, *later)), flush=True)
    raise first


DOES = {f.__name__: f for f in (holds, publishes, commits)}


async def main(does: str, url: str) -> None:
    async with raw_calls(SimpleNamespace(target=parse_url(url).target)) as calls:  # type: ignore[arg-type]
        await DOES[does](calls, url)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
