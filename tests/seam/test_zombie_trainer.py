"""A training run that was stopped and replaced ends with that error when it wakes, and changes nothing any more."""

import asyncio
import signal
from pathlib import Path

import numpy as np
import pytest
from skyrl_rollout.client import RolloutClient
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.weights.publisher import PublishTarget, WeightPublisher
from test_resume import run_of, start
from vllm_server import TINY_MODEL


async def take_over(url: str) -> tuple[int, str]:
    """(version, instance) that the heir leaves there."""
    async with await RolloutClient.connect(url) as client:
        publisher, layout = WeightPublisher(), client.info.model.tensors
        target = PublishTarget(url, await client.acquire_control("the heir"))
        version = client.info.weight_version + 1
        tensors = [(t.name, memoryview(np.ones(t.shape, np.float32))) for t in layout]
        await publisher.publish(layout, tensors, [target], target_version=version, timeout_s=30)
        publisher.close()
        return version, client.info.instance_id


async def served(url: str) -> tuple[int, str, str]:
    async with await RolloutClient.connect(url) as client:
        return client.info.weight_version, client.info.instance_id, (await client.status()).state


@pytest.mark.ci
@pytest.mark.timeout(200)
def test_a_run_that_was_replaced_while_it_slept_ends_with_fenced(tmp_path: Path) -> None:
    with ReferenceServer("--model", str(TINY_MODEL), "--logits", "canary") as server:
        run = start(run_of(tmp_path, f"generator.inference_engine.external_server_urls=[{server.url}]"))
        run.wait_for_step(2)
        run.signal(signal.SIGSTOP)
        version, instance = asyncio.run(take_over(server.url))
        run.signal(signal.SIGCONT)
        code = run.wait(60)
        assert code not in (0, None)
        assert "is fenced: this server is owned by epoch" in run.output and "the heir" in run.output
        assert "Traceback" not in run.output
        assert asyncio.run(served(server.url)) == (version, instance, "serving")
