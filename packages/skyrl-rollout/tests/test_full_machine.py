"""No room for an update, on a disk, in shared memory or in memory: it is said in time, and serving goes on."""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from full_machine import TOKENS
from raw_calls import ask, raw_calls, refused
from raw_updates import begin, draft, forcing, published, state, version
from skyrl_rollout.reference.process import ReferenceServer

pytestmark = pytest.mark.ci
SCRIPT = str(Path(__file__).with_name("full_machine.py"))
SPARE_BYTES, STAGED_BYTES = 256 << 20, 1 << 30


def facts(scenario: str, folder: Path) -> dict[str, Any]:
    """In a mount namespace of its own, so that the small file system goes with the process."""
    allowed = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if allowed.returncode:
        pytest.skip(f"this system lets nobody mount a small disk: {allowed.stderr.strip()}")
    command = ["unshare", "-m", sys.executable, SCRIPT, scenario, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_full_disk_fails_the_publish_in_words_and_the_old_weights_serve_on(tmp_path: Path) -> None:
    told = facts("disk", tmp_path)
    assert told["room"] == {"said": "file", "served": [1, 11], "state": "serving", "open": ""}
    assert told["full"].pop("said").startswith("OSError: [Errno 28]")
    assert told["full"] == {"served": [1, 11], "state": "serving", "open": ""}
    assert told["left"] == [], "what was written of it is removed"
    assert told["again"] == {"said": "file", "served": [2, 33], "state": "serving", "open": ""}
    assert (told["lengths"], told["restarts"]) == ([TOKENS], 0), "what ran meanwhile came whole"


def test_full_shared_memory_is_said_or_gone_round_and_never_a_crash(tmp_path: Path) -> None:
    told = facts("shm", tmp_path)
    serving = {"state": "serving", "open": ""}
    assert told["room"] == {"said": "shm", "served": [1, 11], **serving}
    assert told["kept"] == {"said": "shm", "served": [2, 22], **serving}, "its pages were taken beforehand"
    assert told["falls back"] == {"said": "inline", "served": [3, 33], **serving}
    said = told["insists"].pop("said")
    assert said.startswith("MemoryError: the weights need 3.4 MB of shared memory and /dev/shm has 0.5 MB left")
    assert told["insists"] == {"served": [3, 33], **serving}
    assert told["left"] == []
    assert (told["lengths"], told["restarts"]) == ([TOKENS], 0), "what ran meanwhile came whole"


async def test_an_update_beyond_the_servers_memory_is_refused_at_begin_and_serving_goes_on() -> None:
    with ReferenceServer("--logits", "canary", "--token-delay-ms", "4") as server:
        async with raw_calls(server) as calls:
            epoch = await calls.epoch()
            await published(calls, epoch, draft(1, forcing(11)))
            running = asyncio.create_task(calls.generate(ask(4 * TOKENS)))
            limit = address_space(server.pid) + SPARE_BYTES
            resource.prlimit(server.pid, resource.RLIMIT_AS, (limit, limit))
            d = draft(2, forcing(22))
            far = replace(d.manifest.tensors[-1], offset=STAGED_BYTES)
            manifest = replace(d.manifest, tensors=(*d.manifest.tensors[:-1], far))
            huge = replace(d, manifest=manifest, update_id="huge")
            error = await refused(begin(calls, epoch, huge))
            assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "STAGING_FULL")
            assert error.retry_after_s is None, "waiting gives it no room"
            assert await state(calls, huge.update_id) == "ABORTED" and await version(calls) == 1
            assert (await running).tokens() == [11] * 4 * TOKENS
            await published(calls, epoch, d)
            assert (await calls.generate(ask(3))).tokens() == [22] * 3


def address_space(pid: int) -> int:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["VmSize"].split()[0]) << 10
