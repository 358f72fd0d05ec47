"""What a monitor reads: every metric of the table, with the values of what just happened, and no secret."""

from __future__ import annotations

import asyncio
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration
from made_certificates import Authority
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from raw_calls import RawCalls, ask, fence, refused
from raw_updates import draft, published
from skyrl_rollout.cli import main
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.server.metrics import METRICS, table
from skyrl_rollout.v1 import control_pb2
from skyrl_rollout.v1 import generation_pb2 as pb

DOCS = Path(__file__).parents[1] / "docs"
GENERATE = "RolloutService/Generate"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture(scope="module")
def server() -> Iterator[ReferenceServer]:
    with ReferenceServer("--metrics-listen", "127.0.0.1:0") as process:
        yield process


def read(url: str, token: str = "", context: ssl.SSLContext | None = None) -> dict[str, dict[tuple[str, ...], float]]:
    """Sample name -> label values, by the labels' names -> value."""
    headers = {"Accept": OPENMETRICS} | ({"Authorization": f"Bearer {token}"} if token else {})
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10, context=context) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        text = answer.read().decode()
    read: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            read.setdefault(sample.name, {})[tuple(v for _, v in sorted(sample.labels.items()))] = sample.value
    return read


async def metrics(server: ReferenceServer) -> dict[str, dict[tuple[str, ...], float]]:
    return await asyncio.to_thread(read, server.ready["metrics"])


def test_the_documented_table_is_that_of_the_code() -> None:
    assert table() in (DOCS / "metrics.md").read_text()


async def test_every_metric_of_the_table_is_served_under_its_name(server: ReferenceServer, calls: RawCalls) -> None:
    await calls.generate(ask(3))
    await published(calls, await calls.epoch(), draft(1))
    suffix = {"counter": "_total", "info": "_info", "histogram": "_count"}
    now = await metrics(server)
    assert {m.name + suffix.get(m.kind, "") for m in METRICS.values()} <= set(now)
    assert {"process_start_time_seconds", "process_resident_memory_bytes", "process_open_fds"} <= set(now)
    assert server.ready["instance"] in now["skyrl_rollout_server_info"].popitem()[0]


async def test_calls_are_counted_by_method_and_code(server: ReferenceServer, calls: RawCalls) -> None:
    def count(now: dict[str, dict[tuple[str, ...], float]], *labels: str) -> float:
        return now.get("skyrl_rollout_requests_total", {}).get(labels, 0)  # no sample before the first call

    before = await metrics(server)
    await calls.generate(ask(5))
    await refused(calls.stream(ask(0)))
    never = ask(3, version=pb.VersionPolicy(min_weight_version=99))
    await refused(calls.stream(never, timeout_s=0.1))
    stream = calls.stream(ask(4000))
    await stream.read()
    stream.cancel()
    for _ in range(100):
        after = await metrics(server)
        if count(after, "CANCELLED", GENERATE):
            break
        await asyncio.sleep(0.02)
    for code in ("OK", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "CANCELLED"):
        labels = (code, GENERATE)
        assert count(after, *labels) == count(before, *labels) + 1, code
    made = "skyrl_rollout_tokens_generated_total"
    assert after[made][()] >= before[made][()] + 5


async def test_waiting_and_frozen_generations_and_the_state_are_shown(calls: RawCalls, server: ReferenceServer) -> None:
    heard = pb.StreamOptions(heartbeat=Duration(nanos=10**8))
    waits = calls.stream(ask(3, version=pb.VersionPolicy(min_weight_version=99), stream=heard))
    await waits.read()
    now = await metrics(server)
    assert now["skyrl_rollout_generations"] == {("running",): 0, ("waiting",): 1, ("frozen",): 0}
    epoch = await calls.epoch()
    request = control_pb2.PauseRequest(fence=fence(epoch), mode=control_pb2.PAUSE_MODE_KEEP)
    paused = await calls.engine.Pause(request, timeout=5)
    now = await metrics(server)
    assert {k for k, v in now["skyrl_rollout_state"].items() if v} == {("paused",)}
    await calls.engine.Resume(control_pb2.ResumeRequest(fence=fence(epoch), pause_id=paused.pause_id), timeout=5)
    waits.cancel()


async def test_a_published_version_shows_with_its_bytes_and_its_stall(server: ReferenceServer, calls: RawCalls) -> None:
    before = await metrics(server)
    version = int(before["skyrl_rollout_weight_version"][("",)]) + 1
    update = draft(version)
    await published(calls, await calls.epoch(), update)
    after = await metrics(server)
    assert after["skyrl_rollout_weight_version"][("",)] == version
    name = "skyrl_rollout_update_bytes_total"
    grown = after[name][("inline",)] - before.get(name, {}).get(("inline",), 0)
    assert grown == sum(update.manifest.shard_nbytes().values())
    stalls = "skyrl_rollout_commit_stall_seconds_count"
    assert after[stalls][()] == before[stalls][()] + 1
    for state in ("open", "sealed", "committing", "committed"):
        labels = ("full", state, "inline")
        told = "skyrl_rollout_updates_total"
        assert after[told][labels] == before.get(told, {}).get(labels, 0) + 1


def test_another_machine_reads_metrics_over_tls_with_a_token_only(tmp_path: Path) -> None:
    ours = Authority(tmp_path)
    pair, token = ours.sign("server"), tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("a-token-of-monitors")
    flags = ("--tls-certificate", pair.certificate, "--tls-key", pair.key, "--token-file", f"rollout={token}")
    with ReferenceServer(*map(str, flags), "--metrics-listen", "0.0.0.0:0") as process:
        url = process.ready["metrics"].replace("0.0.0.0", "127.0.0.1")
        trusting = ssl.create_default_context(cafile=str(ours.ca))
        assert "skyrl_rollout_state" in read(url, "a-token-of-monitors", trusting)
        for shown in ("", "another"):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                read(url, shown, trusting)


@pytest.mark.parametrize(
    ("address", "said"),
    [("0.0.0.0:0", r"--metrics-listen 0\.0\.0\.0:0 can be reached"), ("9400", "write host:port"), (":1", "host:port")],
)
def test_an_address_that_metrics_cannot_have_is_refused(
    address: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reference", "--listen", "127.0.0.1:0", "--metrics-listen", address]) == 2
    assert re.search(said, capsys.readouterr().err)
