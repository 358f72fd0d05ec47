"""A run that trains an adapter: its base is published once, the adapter at every step; servers that lost it wait."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.generator.env_generator import EnvGenerator
from skyrl.train.generator.trajectory import PromptTask
from skyrl.train.rollouts.service import RolloutService
from skyrl_rollout.errors import MissingCapability
from skyrl_rollout.reference.process import ReferenceServer, ServedProcess
from skyrl_rollout.tokens import LogprobMode, Sampling
from test_rollout_service import TINY_MODEL, Checkpoint, checkpoint, listen_of, reference_server, until  # noqa: F401

PLAIN_SERVER = Path(__file__).parents[2] / "skyrl-rollout" / "tests" / "plain_server.py"


def config(*urls: str) -> SkyRLTrainConfig:
    policy = {"model": {"path": str(TINY_MODEL), "lora": {"rank": 1}}}
    engine = {"external_server_urls": list(urls)}
    return SkyRLTrainConfig.model_validate({"trainer": {"policy": policy}, "generator": {"inference_engine": engine}})


def everything(*urls: str) -> SkyRLTrainConfig:
    """The same without an adapter."""
    return SkyRLTrainConfig.model_validate({"generator": {"inference_engine": {"external_server_urls": list(urls)}}})


async def versions_sampled(service: RolloutService) -> set[int]:
    generation = await service.pool.generate(
        np.arange(5), Sampling(max_tokens=3, seed=1), mode=LogprobMode.RAW, timeout_s=30
    )
    return set(generation.samples[0].weight_versions)


async def test_the_base_is_published_once_and_the_adapter_at_every_step(checkpoint: Checkpoint) -> None:  # noqa: F811
    with reference_server() as one, reference_server() as two:
        service = await RolloutService.open(config(one.url, two.url), TINY_MODEL)
        for step in (0, 1, 2):
            report = await service.publish(checkpoint, step=step)
            assert (report.kind, len(report.committed)) == ("lora", 2)
        assert report.nbytes < 1e5 < sum(t.numel() * 4 for t in checkpoint.tensors.values())
        assert service.version_of_step == {0: 2, 1: 3, 2: 4} and service.version == 4
        for replica in service.pool.replicas:
            assert replica.versions == {"": 1, "lora": 4}
        assert service.pool.highest_version() == 4 and service.pool.highest_version("") == 1
        await service.close()
        # the servers lived on: another run starts over weights of its own
        service = await RolloutService.open(config(one.url, two.url), TINY_MODEL)
        await service.publish(checkpoint, step=7)
        assert service.pool.replicas[0].versions == {"": 5, "lora": 6}
        assert await versions_sampled(service) == {6}
        await service.close()
        # and so does one that trains all weights
        service = await RolloutService.open(everything(one.url, two.url), TINY_MODEL)
        await service.publish(checkpoint, step=0)
        assert service.pool.replicas[0].versions == {"": 7}
        await service.close()


async def test_trajectories_are_of_the_adapter_and_carry_its_version(
    checkpoint: Checkpoint,  # noqa: F811
    tiny_tokenizer: object,
) -> None:
    with reference_server() as server:
        service = await RolloutService.open(cfg := config(server.url), TINY_MODEL)
        generator = EnvGenerator(cfg, tiny_tokenizer, service.pool)
        task = PromptTask(
            "0", [{"role": "user", "content": "1+1="}], "arithmetic", {"reward_spec": {"ground_truth": "2"}}
        )
        for version in (2, 3):
            await service.publish(checkpoint)
            for phase in ("train", "eval"):
                (t,) = await generator.generate(
                    [task], n_samples=1, sampling=generator.train_sampling, step=1, phase=phase
                )
                assert set(t.weight_versions) == {version}
        base = await service.pool.generate(
            np.arange(5), Sampling(max_tokens=2), mode=LogprobMode.RAW, timeout_s=30, policy_id=""
        )
        assert set(base.samples[0].weight_versions) == {1}, "the base is still there, under its own name"
        await service.close()


async def test_a_server_that_restarts_gets_base_and_adapter_before_it_serves(
    checkpoint: Checkpoint,  # noqa: F811
) -> None:
    with reference_server() as first:
        service = await RolloutService.open(config(first.url), TINY_MODEL)
        for step in (0, 1):
            await service.publish(checkpoint, step=step)
        first.kill()
        with ReferenceServer("--model", str(TINY_MODEL), listen=listen_of(first)):
            assert await versions_sampled(service) == {3}
            assert service.pool.replicas[0].versions == {"": 1, "lora": 3}
            await until(lambda: service.metrics()["rollouts/num_catch_ups"] == 1)
            await service.publish(checkpoint, step=2)
            assert service.version == 4
        await service.close()


@pytest.mark.ci
async def test_a_server_that_restarts_right_before_a_publish_gets_the_base_again(
    checkpoint: Checkpoint,  # noqa: F811
) -> None:
    with reference_server() as one, reference_server() as two:
        service = await RolloutService.open(config(one.url, two.url), TINY_MODEL)
        await service.publish(checkpoint, step=0)
        two.kill()
        with ReferenceServer("--model", str(TINY_MODEL), listen=listen_of(two)):
            await asyncio.gather(service.publish(checkpoint, step=1), asyncio.sleep(0))
            await until(lambda: [r.versions for r in service.pool.replicas] == [{"": 1, "lora": 3}] * 2)
        await service.close()


async def test_a_server_without_adapters_is_refused_before_any_step() -> None:
    with ServedProcess([sys.executable, str(PLAIN_SERVER)]) as server:
        url = server.ready["url"]
        with pytest.raises(MissingCapability, match="does not take any: start the server with room for adapters") as e:
            await RolloutService.open(config(url), TINY_MODEL)
        assert url in e.value.message and "trainer.policy.model.lora.rank=1" in e.value.message
