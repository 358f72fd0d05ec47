"""Connections that live long: certificates are replaced under traffic, and pings below the floor end no call."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration
from made_certificates import Authority
from raw_calls import RawCalls, ask
from skyrl_rollout.client import RolloutClient
from skyrl_rollout.conformance import ITEMS, Plan, connected, run
from skyrl_rollout.conformance.item import PASSED
from skyrl_rollout.errors import RolloutError
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.security import Credentials
from skyrl_rollout.tokens import LogprobMode, Sampling
from skyrl_rollout.v1 import generation_pb2 as pb
from tcp_proxy import TcpProxy

CALLERS, TOKENS = 6, 60
FLOOR_MS, PING_MS, PINGS = 500, 50, 40
PING_FRAME = bytes([0, 0, 8, 6, 0, 0, 0, 0, 0])  # HTTP/2: 8 bytes follow, type 6, no flag, no stream


def write(folder: Path, names: dict[str, bytes]) -> None:
    """Each file is replaced as a whole, the key before its certificate."""
    for name, content in names.items():
        (folder / f"{name}.new").write_bytes(content)
        (folder / f"{name}.new").replace(folder / name)


class Side:
    """The three files of one end of the connection."""

    def __init__(self, folder: Path, name: str, authority: Authority) -> None:
        folder.mkdir()
        self.folder, self._name = folder, name
        self.trust(authority)
        self.show(authority)

    def trust(self, *authorities: Authority) -> None:
        write(self.folder, {"ca": b"".join(a.ca.read_bytes() for a in authorities)})

    def show(self, authority: Authority) -> None:
        pair = authority.sign(self._name)
        write(self.folder, {"key": pair.key.read_bytes(), "crt": pair.certificate.read_bytes()})


async def traffic(client: RolloutClient, done: asyncio.Event, told: Counter[str]) -> None:
    """One call after the other; what each came to."""
    while not done.is_set():
        try:
            generation = await client.generate(
                [1], Sampling(max_tokens=TOKENS, ignore_eos=True), mode=LogprobMode.RAW, timeout_s=10
            )
            told[f"{len(generation.samples[0].token_ids)} tokens"] += 1
        except RolloutError as error:
            told[error.message] += 1


@pytest.mark.ci
async def test_an_authority_is_replaced_under_traffic_without_one_failed_call(tmp_path: Path) -> None:
    first, second = (Authority(tmp_path / name, name) for name in ("first", "second"))
    ours, theirs = Side(tmp_path / "trainer", "trainer", first), Side(tmp_path / "server", "server", first)
    s, o = theirs.folder, ours.folder
    flags = ("--tls-certificate", s / "crt", "--tls-key", s / "key", "--tls-client-ca", s / "ca")
    shown = Credentials.from_files(roots=o / "ca", certificate=o / "crt", private_key=o / "key")
    with ReferenceServer(*map(str, flags), "--token-delay-ms", "2") as process:
        async with await RolloutClient.connect(process.url, credentials=shown) as client:
            done, told = asyncio.Event(), Counter[str]()
            callers = [asyncio.create_task(traffic(client, done, told)) for _ in range(CALLERS)]
            steps: tuple[Callable[[], None], ...] = (
                lambda: (theirs.trust(first, second), ours.trust(first, second)),  # type: ignore[return-value]
                lambda: theirs.show(second),
                lambda: ours.show(second),
                lambda: (theirs.trust(second), ours.trust(second)),  # type: ignore[return-value]
            )
            for step in steps:
                calls_before = told.total()
                step()
                while told.total() < calls_before + 3 * CALLERS:
                    await asyncio.sleep(0.02)
            done.set()
            await asyncio.gather(*callers)
            assert set(told) == {f"{TOKENS} tokens"} and told.total() > 12 * CALLERS
        old = Side(tmp_path / "late", "trainer", first).folder
        late = Credentials.from_files(roots=old / "ca", certificate=old / "crt", private_key=old / "key")
        with pytest.raises(RolloutError):
            await RolloutClient.connect(process.url, credentials=late, timeout_s=0.5)


@pytest.mark.ci
async def test_pings_below_the_floor_that_the_server_tells_end_no_silent_call() -> None:
    """gRPC's own client pings once a second at most, so the proxy pings in its name while it is silent."""
    silent = pb.StreamOptions(heartbeat=Duration(seconds=60))
    quiet = ask(3, version=pb.VersionPolicy(min_weight_version=9), stream=silent)
    with ReferenceServer() as process:
        async with TcpProxy(process.url) as proxy, await RolloutClient.connect(proxy.url) as client:
            assert client.info.limits.keepalive_min_interval_ms == FLOOR_MS
            async with grpc.aio.insecure_channel(proxy.url.removeprefix("grpc://")) as channel:
                call = RawCalls(channel).stream(quiet, timeout_s=60)
                reading = asyncio.ensure_future(call.read())
                await asyncio.sleep(0.3)
                for i in range(PINGS):
                    proxy.add(PING_FRAME + i.to_bytes(8, "big"))
                    await asyncio.sleep(PING_MS / 1000)
                assert not reading.done(), await call.details()
                call.cancel()
                await asyncio.wait((reading,))


@pytest.mark.long
async def test_a_silent_minute_with_a_ping_every_second_is_survived() -> None:
    """Item 18 of the conformance suite in full length; CI keeps silent for six seconds."""
    with ReferenceServer() as process:
        async with connected(Plan(process.url, full_length=True)) as target:
            [found] = await run(target, [item for item in ITEMS if item.number == 18])
    assert (found.status, found.reason) == (PASSED, "60 s of silence")
