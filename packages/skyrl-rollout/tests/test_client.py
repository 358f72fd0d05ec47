"""The client against a real server process: what it returns, refuses, and how every wait ends."""

import asyncio
import shutil
import subprocess
import time

import numpy as np
import pytest
from skyrl_rollout.client import RolloutClient
from skyrl_rollout.errors import (
    DeadlineExceeded,
    Fenced,
    InvalidRequest,
    ProtocolMismatch,
    RequestIdReused,
    ServerUnreachable,
    UnknownPause,
)
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.security import Credentials
from skyrl_rollout.tokens import FinishReason, LogprobMode, Sampling

RAW = LogprobMode.RAW
LONG = Sampling(max_tokens=2000, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def server():
    with ReferenceServer("--token-delay-ms", "1") as running:
        yield running


@pytest.fixture
async def client(server):
    async with await RolloutClient.connect(server.url, heartbeat_s=0.5) as connected:
        yield connected


async def until(condition, timeout_s: float = 2.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.02)


async def test_samples_come_back_complete_with_a_version_for_every_token(client):
    sampling = Sampling(max_tokens=40, seed=7, ignore_eos=True)
    first = await client.generate([1, 2, 3], sampling, mode=RAW, num_samples=3, timeout_s=10)
    again = await client.generate(np.array([1, 2, 3]), sampling, mode=RAW, num_samples=3, timeout_s=10)
    assert [len(s.token_ids) for s in first.samples] == [40] * 3
    for a, b in zip(first.samples, again.samples, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist() and a.logprobs.tolist() == b.logprobs.tolist()
        assert set(a.weight_versions) == {client.info.weight_version} and a.finish_reason is FinishReason.LENGTH
    assert first.effective == sampling and first.instance_id == client.info.instance_id and first.mode is RAW


async def test_progress_counts_tokens_up_to_the_last(client):
    seen: list[int] = []
    sampling = Sampling(max_tokens=150, seed=1, ignore_eos=True)
    await client.generate([5], sampling, mode=RAW, num_samples=2, timeout_s=10, on_progress=seen.append)
    assert seen == sorted(seen) and seen[-1] == 300 and len(set(seen)) > 3


async def test_what_the_server_refuses_says_which_field_and_why(client):
    with pytest.raises(InvalidRequest, match="vocabulary"):
        await client.generate([10**6], Sampling(), mode=RAW, timeout_s=10)
    with pytest.raises(InvalidRequest) as refused:
        await client.generate([1], Sampling(top_p=2.0), mode=RAW, timeout_s=10)
    assert refused.value.violations[0][0] == "sampling.top_p"
    with pytest.raises(ValueError, match="flat list of integers"):
        await client.generate([0.5], Sampling(), mode=RAW, timeout_s=10)


async def test_one_id_is_one_run_for_equal_requests_and_an_error_for_others(client):
    sampling = Sampling(max_tokens=50, ignore_eos=True)  # no seed: two runs would differ
    calls = [client.generate([1], sampling, mode=RAW, timeout_s=10, request_id="twin") for _ in range(2)]
    a, b = await asyncio.gather(*calls)
    assert a.samples[0].token_ids.tolist() == b.samples[0].token_ids.tolist()
    with pytest.raises(RequestIdReused):
        await client.generate([2], sampling, mode=RAW, timeout_s=10, request_id="twin")


async def test_a_generation_that_is_left_early_frees_the_server(client):
    task = asyncio.create_task(client.generate([1], LONG, mode=RAW, timeout_s=60))
    await until(lambda: _running(client, 1))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: _running(client, 0))


async def test_a_deadline_names_the_request_and_ends_the_work(client):
    with pytest.raises(DeadlineExceeded, match=r"request slow did not finish within 0.3 s at grpc://.*0 of 2 samples"):
        await client.generate([1], LONG, mode=RAW, timeout_s=0.3, request_id="slow", num_samples=2)
    await until(lambda: _running(client, 0))


async def test_an_abort_is_a_result_with_the_tokens_made_so_far(client):
    task = asyncio.create_task(client.generate([1], LONG, mode=RAW, timeout_s=60, request_id="stop-me"))
    await until(lambda: _running(client, 1))
    await asyncio.sleep(0.1)
    assert await client.abort(["stop-me", "never-seen"]) == (["stop-me"], ["never-seen"])
    (sample,) = (await task).samples
    assert sample.finish_reason is FinishReason.ABORTED and 0 < len(sample.token_ids) < 2000
    assert len(sample.weight_versions) == len(sample.token_ids)


async def test_a_pause_holds_tokens_back_until_its_own_id_resumes(client):
    epoch = await client.acquire_control("test")
    pause_id = await client.pause(epoch, "keep")
    assert (await client.status()).state == "paused" and await client.health()
    task = asyncio.create_task(client.generate([1], Sampling(max_tokens=2), mode=RAW, timeout_s=10))
    await asyncio.sleep(0.2)
    assert not task.done()
    with pytest.raises(UnknownPause):
        await client.resume(epoch, "another")
    await client.resume(epoch, pause_id)
    await task


async def test_a_pause_that_waits_for_a_straggler_ends_at_its_deadline_and_the_server_goes_on(client):
    epoch = await client.acquire_control("test")
    task = asyncio.create_task(client.generate([1], LONG, mode=RAW, timeout_s=60))
    await until(lambda: _running(client, 1))
    with pytest.raises(DeadlineExceeded, match=r"no answer to Pause within 0.4 s from grpc://127.0.0.1"):
        await client.pause(epoch, "wait", timeout_s=0.4)
    await until(lambda: _state(client, "serving"))
    task.cancel()


async def test_an_older_trainer_is_fenced_at_once(client):
    old = await client.acquire_control("old")
    assert await client.acquire_control("new") > old
    began = time.monotonic()
    with pytest.raises(Fenced):
        await client.pause(old, "keep")
    assert time.monotonic() - began < 1.0


async def test_status_is_reported_at_once_and_then_at_the_interval(client):
    reports = client.watch_status(0.1)
    seen = [report async for report, _ in _zip(reports, 3)]
    assert {r.instance_id for r in seen} == {client.info.instance_id} and seen[0].state == "serving"
    await reports.aclose()


async def test_two_protocols_that_do_not_fit_are_named(server):
    with pytest.raises(ProtocolMismatch, match=r"protocol 1\.0 .*needs 1\.9: upgrade the server"):
        await RolloutClient.connect(server.url, needed_minor=9)


@pytest.mark.parametrize("listens", [False, True], ids=["nobody listens", "somebody listens and never answers"])
async def test_a_dead_endpoint_is_named_within_the_timeout(listens):
    dumb = await asyncio.start_server(lambda r, w: asyncio.sleep(60), "127.0.0.1", 0)
    port = dumb.sockets[0].getsockname()[1]
    if not listens:
        dumb.close()
        await dumb.wait_closed()
    began = time.monotonic()
    with pytest.raises(ServerUnreachable, match=f"no rollout server answers at grpc://127.0.0.1:{port}: tried"):
        await RolloutClient.connect(f"grpc://127.0.0.1:{port}", timeout_s=1.0)
    assert time.monotonic() - began < 2.5
    dumb.close()


async def test_an_http_url_is_refused_without_dialling():
    with pytest.raises(ValueError, match="write grpc://127.0.0.1:8000"):
        await RolloutClient.connect("http://127.0.0.1:8000")


async def test_hundreds_of_concurrent_generations_finish_over_one_connection(client):
    sampling = Sampling(max_tokens=20, ignore_eos=True)
    calls = [client.generate([i % 60], sampling, mode=RAW, timeout_s=60, num_samples=2) for i in range(300)]
    generations = await asyncio.gather(*calls)
    assert sum(len(s.token_ids) for g in generations for s in g.samples) == 300 * 2 * 20


async def _running(client: RolloutClient, count: int) -> bool:
    return (await client.status()).running == count


async def _state(client: RolloutClient, state: str) -> bool:
    return (await client.status()).state == state


async def _zip(items, count):
    for i in range(count):
        yield await anext(items), i


@pytest.fixture
def certificate(tmp_path):
    """(certificate, private key) of 127.0.0.1, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate of this test")
    paths = tmp_path / "server.pem", tmp_path / "server.key"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=rollout"
    subprocess.run(
        [*command.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-out", paths[0], "-keyout", paths[1]],
        check=True,
        capture_output=True,
    )
    return paths


async def test_tls_serves_those_who_trust_the_server_and_nobody_else(certificate):
    flags = ("--tls-certificate", str(certificate[0]), "--tls-key", str(certificate[1]))
    with ReferenceServer(*flags) as secured:
        assert secured.url.startswith("grpcs://")
        trusting = Credentials.from_files(roots=certificate[0])
        async with await RolloutClient.connect(secured.url, credentials=trusting) as client:
            await client.generate([1], Sampling(max_tokens=2), mode=RAW, timeout_s=10)
        with pytest.raises(ServerUnreachable, match=secured.url):
            await RolloutClient.connect(secured.url, timeout_s=0.5)


async def test_a_unix_socket_is_an_endpoint_like_any_other(tmp_path):
    with ReferenceServer(listen=f"unix:{tmp_path}/rollout.sock") as local:
        assert local.url == f"unix://{tmp_path}/rollout.sock"
        async with await RolloutClient.connect(local.url) as client:
            generation = await client.generate([1], Sampling(max_tokens=5, ignore_eos=True), mode=RAW, timeout_s=10)
    assert len(generation.samples[0].token_ids) == 5
