"""Does a line of a server's log say whose it is, in both formats, without what a caller must not put there?"""

from __future__ import annotations

import asyncio
import json

import grpc
import pytest
from raw_calls import PROMPT, RawCalls, ask, raw_calls, refused
from raw_updates import draft, flipped, published, staged
from skyrl_rollout.reference.process import ReferenceServer

SECRET = "s3cret-" * 8


async def said(server: ReferenceServer, word: str) -> str:
    """The log once `word` is in it."""
    async with asyncio.timeout(5):
        while word not in server.last_lines(200):
            await asyncio.sleep(0.02)
    return server.last_lines(200)


async def exercise(calls: RawCalls) -> tuple[str, str]:
    """(id of a refused request, id of a committed update)."""
    first = ask(4, request_id="evil\nERROR forged line")
    await calls.generate(first)
    other = ask(5, request_id="evil\nERROR forged line")
    assert (await refused(calls.stream(other))).code is grpc.StatusCode.ALREADY_EXISTS
    d = draft(1)
    await published(calls, await calls.epoch(), d)
    return first.request_id, d.update_id


async def test_json_lines_are_objects_with_the_ids_of_their_call() -> None:
    with ReferenceServer("--log-format", "json") as server:
        async with raw_calls(server) as calls:
            request_id, update_id = await exercise(calls)
        log = await said(server, update_id)
        lines = [json.loads(line) for line in log.splitlines() if not line.startswith("ready ")]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    refusal = next(line for line in lines if "refused with ALREADY_EXISTS" in line["message"])
    assert (refusal["method"], refusal["request_id"]) == ("RolloutService/Generate", request_id)
    commit = next(line for line in lines if "committed" in line["message"])
    assert (commit["method"], commit["update_id"]) == ("WeightService/CommitUpdate", update_id)


async def test_a_line_of_text_cannot_be_forged_by_an_id() -> None:
    with ReferenceServer() as server:
        async with raw_calls(server) as calls:
            _, update_id = await exercise(calls)
        log = await said(server, update_id)
    assert "ERROR forged line" in log and not any(line.startswith("ERROR forged") for line in log.splitlines())
    assert f"update_id={update_id}" in log


@pytest.mark.parametrize("log_format", ["text", "json"])
async def test_no_token_of_a_prompt_and_no_credential_reaches_the_log(tmp_path, log_format: str) -> None:
    (tmp_path / "token").write_text(SECRET)
    (tmp_path / "token").chmod(0o600)
    flags = ("--log-format", log_format, "--token-file", f"control={tmp_path / 'token'}")
    with ReferenceServer(*flags) as server:
        async with raw_calls(server) as calls:
            metadata = (("authorization", f"Bearer {SECRET}"),)
            request = ask(3, request_id="a request of note")
            async for _ in calls.rollout.Generate(request, timeout=10, metadata=metadata):
                pass
            changed = ask(4, request_id=request.request_id)
            await refused(calls.rollout.Generate(changed, timeout=10, metadata=metadata))
            await refused(
                calls.rollout.Generate(request, timeout=10, metadata=(("authorization", f"Bearer {SECRET}x"),))
            )
        log = await said(server, "UNAUTHENTICATED")
    assert "a request of note" in log
    assert SECRET not in log and str(PROMPT.tolist())[1:-1] not in log


async def test_the_error_of_an_upload_names_its_update() -> None:
    with ReferenceServer("--log-format", "json") as server:
        async with raw_calls(server) as calls:
            epoch = await calls.epoch()
            d = flipped(draft(1))
            await refused(staged(calls, epoch, d))
        log = await said(server, "refused with DATA_LOSS")
        lines = [json.loads(line) for line in log.splitlines() if not line.startswith("ready ")]
    assert next(x for x in lines if "DATA_LOSS" in x["message"])["update_id"] == d.update_id
