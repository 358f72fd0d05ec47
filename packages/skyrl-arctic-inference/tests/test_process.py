"""How an `arctic-serve` process starts, refuses to start, and ends: nothing is ever left running or lying about."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import tempfile
import time
from pathlib import Path

import pytest
from serve_process import TINY_MODEL, ServeProcess, all_gone, run_to_end
from skyrl_arctic_inference.socket_folder import SocketFolder
from skyrl_rollout.client import RolloutClient
from skyrl_rollout.errors import RolloutError
from skyrl_rollout.tokens import FinishReason, LogprobMode, Sampling

pytestmark = pytest.mark.ci
ENDLESS = Sampling(max_tokens=2000, ignore_eos=True)


async def hold(client: RolloutClient, count: int) -> list[asyncio.Task]:
    """Requests that run and will not end soon."""
    patience = {"timeout_s": 60, "detach_grace_s": 0, "unreachable_s": 5}
    tasks = [
        asyncio.create_task(client.generate([5 + i], ENDLESS, mode=LogprobMode.SAMPLING, **patience))
        for i in range(count)
    ]
    async with asyncio.timeout(10):
        while (await client.status()).running < count:
            await asyncio.sleep(0.02)
    return tasks


async def test_sigterm_drains_and_ends_with_exit_code_zero_and_nothing_left():
    with ServeProcess(TINY_MODEL, "--drain-grace-s", "0.2") as server:
        pids = server.engine_pids()
        assert pids
        async with await RolloutClient.connect(server.url, timeout_s=20) as client:
            tasks = await hold(client, 4)
            began = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            samples = [(await t).samples[0] for t in tasks]
        assert {s.finish_reason for s in samples} == {FinishReason.ABORTED} and all(len(s.token_ids) for s in samples)
        assert await asyncio.to_thread(server.wait) == 0, server.output()
        print(f"SIGTERM to exit: {time.monotonic() - began:.1f} s")
        assert all_gone(pids, 1.0)
        assert "Traceback" not in server.output()


async def test_a_dead_engine_ends_streams_as_unavailable_and_the_process_with_an_error():
    with ServeProcess(TINY_MODEL) as server:
        async with await RolloutClient.connect(server.url, timeout_s=20) as client:
            tasks = await hold(client, 2)
            for pid in server.engine_pids():
                os.kill(pid, signal.SIGKILL)
            for task in tasks:
                with pytest.raises(RolloutError) as error:
                    await task
                assert error.value.code.name == "UNAVAILABLE"
        assert await asyncio.to_thread(server.wait, 20) == 1
        assert server.output().splitlines()[-1].startswith("arctic-serve: error: the engine process died")
        assert all_gone(server.engine_pids(), 1.0)


def test_nothing_outlives_a_killed_front_or_a_parent_that_is_gone(short_folder: Path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(short_folder))
    with ServeProcess(TINY_MODEL) as server:
        pids = server.engine_pids()
        assert pids
        server.kill()
        assert all_gone(pids, 5.0)
    assert not list(short_folder.glob("arctic-serve-*"))
    read, write = os.pipe()
    with ServeProcess(TINY_MODEL, "--drain-grace-s", "0.2", parent_fd=read) as server:
        os.close(read)
        pids = [server.pid, *server.engine_pids()]
        os.close(write)
        server.process.wait(20)
        assert all_gone(pids, 5.0)
    assert not list(short_folder.glob("arctic-serve-*"))


def test_a_front_killed_while_the_engine_starts_leaves_no_process(short_folder: Path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(short_folder))
    with ServeProcess(TINY_MODEL, wait=False) as server:
        deadline = time.monotonic() + 120
        while not (pids := server.engine_pids()):
            assert time.monotonic() < deadline and server.process.poll() is None, server.output()
            time.sleep(0.01)
        server.process.send_signal(signal.SIGKILL)
        assert all_gone(pids, 5.0)
    assert len(list(short_folder.glob("arctic-serve-*"))) == 1  # sockets that no longer have an owner
    monkeypatch.setattr("tempfile.tempdir", str(short_folder))
    SocketFolder().close()
    assert not list(short_folder.glob("arctic-serve-*"))


def test_sigterm_while_it_loads_ends_it_at_once():
    with ServeProcess(TINY_MODEL, wait=False) as server:
        time.sleep(1.0)
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(5)


def test_ctrl_c_while_the_engine_starts_is_not_lost(short_folder: Path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(short_folder))
    with ServeProcess(TINY_MODEL, wait=False) as server:
        deadline = time.monotonic() + 120
        while not (pids := server.engine_pids()):
            assert time.monotonic() < deadline and server.process.poll() is None, server.output()
            time.sleep(0.01)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(2) == 130
        assert all_gone(pids, 5.0)
    assert not list(short_folder.glob("arctic-serve-*"))


@pytest.fixture
def short_folder():
    """A socket's path has 107 bytes at most, so pytest's own temporary folders will not do."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def broken(tmp_path: Path):
    """Copies the model, lets `change` spoil config.json, and returns the folder."""

    def make(change) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(TINY_MODEL, folder)
        config = json.loads((folder / "config.json").read_text())
        change(config)
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


def refused(model: Path | str, *flags: str, said: str, code: int, **more) -> None:
    done = run_to_end(model, *flags, **more)
    lines = [line for line in done.stderr.splitlines() if line.startswith("arctic-serve: error: ")]
    assert done.returncode == code and len(lines) == 1 and done.stdout == "", done.stderr
    assert said in lines[0] and done.stderr.splitlines()[-1] == lines[0] and "Traceback" not in done.stderr, done.stderr


def test_a_missing_model_folder_is_one_line():
    refused("/no/such/model", said="--model /no/such/model: there is no such folder", code=2)


def test_a_folder_without_weights_is_one_line(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, said="no *.safetensors", code=2)


def test_an_architecture_that_vllm_does_not_have_is_one_line(broken):
    model = broken(lambda c: c.update(architectures=["NoSuchForCausalLM"], model_type="qwen3"))
    refused(model, said="NoSuchForCausalLM", code=1)


def test_a_port_in_use_is_one_line_before_the_engine_starts():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        began = time.monotonic()
        refused(TINY_MODEL, listen=listen, said=listen, code=2)
        assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("flags", "said", "code"),
    [
        (["--engine-arg", "blok_size=16"], "blok_size: vLLM has no such engine argument, did you mean block_size?", 1),
        (["--engine-arg", "logprobs_mode=raw_logits"], "the protocol needs it to be 'processed_logprobs'", 2),
        (["--engine-arg", 'max_model_len="long"'], "expected a value of type int", 2),
        (["--engine-arg", "block_size"], "is not KEY=JSON", 2),
        (["--max-num-seqs", "0"], "--max-num-seqs is 0, expected at least 1", 2),
        (["--cpu-cores", "4096"], "--cpu-cores is 4096", 2),
        (["--max-model-len", "1000000"], "1000000", 1),
    ],
)
def test_a_bad_flag_is_one_line_that_names_it(flags, said, code):
    refused(TINY_MODEL, *flags, said=said, code=code)


def test_an_engine_that_fails_while_it_starts_says_why_last(tmp_path: Path):
    done = run_to_end(TINY_MODEL, "--kv-cache-gib", "0.0001", "--max-model-len", "2048")
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and last.startswith("arctic-serve: error: the engine did not start: "), done.stderr
    assert "KV cache" in last or "max seq len" in last, last
