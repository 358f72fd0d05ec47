"""Whether a run finds or starts its servers, gives them its weights, notices a dead one, and leaves nothing behind."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import skyrl.train.quickstart
import torch
from safetensors.torch import load_file
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.generator.env_generator import EnvGenerator
from skyrl.train.generator.trajectory import PromptTask
from skyrl.train.policy.contract import AdapterSpec
from skyrl.train.policy.publishing import Publisher, cast_layouts, tensor_layouts
from skyrl.train.rollouts import watch
from skyrl.train.rollouts.service import RolloutService
from skyrl.train.rollouts.watch import ServerDied
from skyrl_rollout.errors import DeadlineExceeded, Fenced, ModelMismatch, ServerUnreachable
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.tokens import LogprobMode, Sampling
from skyrl_rollout.weights.publisher import PublishReport, PublishTarget

pytestmark = pytest.mark.ci
TINY_MODEL = Path(skyrl.train.quickstart.__file__).parent / "tiny_model"
SLOW = ("--token-delay-ms", "20")


class Checkpoint:
    """A folder's weights, published as a policy group would."""

    def __init__(self, tensors: dict[str, torch.Tensor] | None = None) -> None:
        self.tensors = tensors or load_file(TINY_MODEL / "model.safetensors")
        self._publisher = Publisher()

    def publish(
        self, targets: Sequence[PublishTarget], *, target_version: int, dtype: str | None, timeout_s: float
    ) -> PublishReport:
        layout = cast_layouts(tensor_layouts(self.tensors.items()), dtype)
        return self._publisher.publish(
            layout, self.tensors.items(), targets, target_version=target_version, timeout_s=timeout_s
        )

    def publish_adapter(
        self, targets: Sequence[PublishTarget], *, target_version: int, dtype: str | None, timeout_s: float
    ) -> PublishReport:
        """Of rank 1 on the embedding."""
        embedding = self.tensors["model.embed_tokens.weight"]
        shapes = {"A": (1, embedding.shape[1]), "B": (embedding.shape[0], 1)}
        tensors = {
            f"base_model.model.model.embed_tokens.lora_{side}.weight": torch.full(shape, float(target_version))
            for side, shape in shapes.items()
        }
        return self._publisher.publish_adapter(
            cast_layouts(tensor_layouts(tensors.items()), dtype),
            tensors.items(),
            targets,
            adapter=AdapterSpec(rank=1, alpha=1.0),
            target_version=target_version,
            timeout_s=timeout_s,
        )

    def catch_up(self, targets: Sequence[PublishTarget], *, timeout_s: float) -> PublishReport:
        return self._publisher.catch_up(targets, timeout_s=timeout_s)

    def close(self) -> None:
        self._publisher.close()


@pytest.fixture
def checkpoint():
    checkpoint = Checkpoint()
    yield checkpoint
    checkpoint.close()


def config(*urls: str, **engine) -> SkyRLTrainConfig:
    engine |= {"external_server_urls": list(urls)} if urls else {"backend": "reference"}
    return SkyRLTrainConfig.model_validate({"generator": {"inference_engine": engine}})


def reference_server(*flags: str) -> ReferenceServer:
    return ReferenceServer("--model", str(TINY_MODEL), *flags)


async def long_generation(service: RolloutService):
    """20 s under the flags of `SLOW`."""
    return await service.pool.generate(
        np.arange(5), Sampling(max_tokens=1000, ignore_eos=True), mode=LogprobMode.RAW, timeout_s=60
    )


async def until_it_raises(look: Callable[[], None], *, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        look()
        await asyncio.sleep(0.1)


async def test_each_publish_is_the_next_version_of_the_servers_and_steps_are_mapped_to_it(checkpoint):
    with reference_server() as server:
        service = await RolloutService.open(config(server.url), TINY_MODEL)
        assert service.version == 0
        report = await service.publish(checkpoint, step=0)
        await service.publish(checkpoint, step=1)
        assert report.nbytes >= sum(t.numel() * 4 for t in checkpoint.tensors.values())
        assert (service.version, service.pool.highest_version()) == (2, 2)
        assert service.version_of_step == {0: 1, 1: 2}
        await service.close()
        # The server lived on: another run's steps begin above its versions.
        service = await RolloutService.open(config(server.url), TINY_MODEL)
        await service.publish(checkpoint, step=30)
        assert service.version_of_step == {30: 3}
        await service.close()


async def test_trajectories_carry_the_version_that_was_published_last(checkpoint, tiny_tokenizer):
    with reference_server() as server:
        service = await RolloutService.open(cfg := config(server.url), TINY_MODEL)
        generator = EnvGenerator(cfg, tiny_tokenizer, service.pool)
        row = PromptTask(
            "0", [{"role": "user", "content": "1+1="}], "arithmetic", {"reward_spec": {"ground_truth": "002"}}
        )
        for version in (1, 2):
            await service.publish(checkpoint)
            (t,) = await generator.generate(
                [row], n_samples=1, sampling=generator.train_sampling, step=1, phase="train"
            )
            assert set(t.weight_versions) == {version}
        await service.close()


async def test_a_replica_that_is_behind_catches_up_with_the_next_publish(checkpoint):
    with reference_server() as one, reference_server() as two:
        alone = await RolloutService.open(config(one.url), TINY_MODEL)
        for _ in range(3):
            await alone.publish(checkpoint)
        await alone.close()
        both = await RolloutService.open(config(one.url, two.url), TINY_MODEL)
        await both.publish(checkpoint)
        assert [client.info.weight_version for client in both.pool.clients] == [4, 4]
        await both.close()


async def test_a_server_of_another_model_is_refused_with_the_tensors_that_differ(checkpoint):
    other = Checkpoint({**checkpoint.tensors, "model.norm.weight": torch.zeros(3), "extra": torch.zeros(1)})
    with reference_server() as server:
        service = await RolloutService.open(config(server.url), TINY_MODEL)
        with pytest.raises(ModelMismatch, match=r"2 tensors differ(\n|.)*extra(\n|.)*model.norm.weight: shape \[3\]"):
            await service.publish(other)
        assert service.version == 0
        await service.close()
    other.close()


async def test_a_dead_endpoint_is_named_within_ten_seconds():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"grpc://127.0.0.1:{taken.getsockname()[1]}"
        started = time.monotonic()
        with pytest.raises(ServerUnreachable, match=url):
            await RolloutService.open(config(url), TINY_MODEL)
        assert time.monotonic() - started < 12


async def test_a_server_that_the_run_started_is_stopped_with_it(checkpoint):
    waits = []
    service = await RolloutService.open(config(), TINY_MODEL, on_wait=waits.append)
    (process,) = service._processes
    await service.publish(checkpoint, step=0)
    await service.close()
    assert not process.alive()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
    assert any("connection to" in what for what in waits)


async def test_a_server_that_dies_during_a_generation_is_named_with_its_last_lines():
    command = " ".join(["skyrl-rollout reference --model {model} --listen {listen}", *SLOW])
    service = await RolloutService.open(config(server_command=command), TINY_MODEL)
    (process,) = service._processes
    running = asyncio.create_task(long_generation(service))
    await asyncio.sleep(0.5)
    assert not running.done()
    os.kill(process.pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(ServerDied, match=rf"server at {process.url} \(process {process.pid}\) died(\n|.)*ready url="):
        await running
    assert time.monotonic() - started < 5
    with pytest.raises(ServerDied):
        service.server_alive_or_raise()
    await service.close()


async def test_a_server_that_died_before_a_publish_is_named(checkpoint):
    service = await RolloutService.open(config(), TINY_MODEL)
    os.kill(service._processes[0].pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(ServerDied, match=r"died during the run \(killed by SIGKILL, perhaps for want of memory\)"):
        await service.publish(checkpoint)
    assert time.monotonic() - started < 5
    await service.close()


async def test_a_publish_that_takes_too_long_names_its_key(checkpoint):
    with reference_server() as server:
        service = await RolloutService.open(config(server.url, publish_timeout_s=1e-4), TINY_MODEL)
        with pytest.raises(DeadlineExceeded, match=r"generator\.inference_engine\.publish_timeout_s=0\.0001"):
            await service.publish(checkpoint)
        await service.close()


async def test_an_external_server_that_stays_away_ends_the_work_that_waits_for_it(monkeypatch):
    monkeypatch.setattr(watch, "EXTERNAL_AWAY_S", 0.5)
    monkeypatch.setattr(watch, "EXTERNAL_POLL_S", 0.2)
    with reference_server(*SLOW) as server:
        service = await RolloutService.open(config(server.url), TINY_MODEL)
        running = asyncio.create_task(long_generation(service))
        await asyncio.sleep(0.3)
        server.kill()
        with pytest.raises(ServerDied, match=f"{server.url} has been away"):
            await running
        await service.close()


def listen_of(server: ReferenceServer) -> str:
    return server.url.removeprefix("grpc://")


async def until(holds: Callable[[], bool], *, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_a_server_that_restarts_gets_the_weights_before_it_serves(checkpoint):
    with reference_server() as first:
        service = await RolloutService.open(config(first.url), TINY_MODEL)
        await service.publish(checkpoint, step=0)
        await service.publish(checkpoint, step=1)
        first.kill()
        with ReferenceServer("--model", str(TINY_MODEL), listen=listen_of(first)) as second:
            generation = await service.pool.generate(
                np.arange(5), Sampling(max_tokens=3, seed=1), mode=LogprobMode.RAW, timeout_s=30
            )
            assert set(generation.samples[0].weight_versions) == {2}
            assert service.pool.replicas[0].instance_id == generation.instance_id
            await until(lambda: service.metrics()["rollouts/num_catch_ups"] == 1)
            await service.publish(checkpoint, step=2)
            assert service.version == 3 and second.alive
        await service.close()


async def test_a_version_is_published_once_though_the_server_that_had_it_restarts(checkpoint):
    with reference_server() as first:
        service = await RolloutService.open(config(first.url), TINY_MODEL)
        for step in (0, 1):
            await service.publish(checkpoint, step=step)
        first.kill()
        with ReferenceServer("--model", str(TINY_MODEL), listen=listen_of(first)):
            await service.publish(checkpoint, step=2)
            assert service.version_of_step == {0: 1, 1: 2, 2: 3}
        await service.close()


async def test_the_run_goes_on_without_a_lost_server_says_so_and_takes_it_back(checkpoint, caplog, monkeypatch):
    monkeypatch.setattr("skyrl_rollout.weights.publisher.AWAY_S", 0.5)
    with reference_server() as one, reference_server() as two:
        service = await RolloutService.open(config(one.url, two.url), TINY_MODEL)
        await service.publish(checkpoint, step=0)
        two.kill()
        report = await service.publish(checkpoint, step=1)
        assert report.committed == (one.url,) and service.version == 2
        assert f"{two.url} missed version 2 and gets no work until it has it" in caplog.text
        assert service.metrics()["rollouts/num_servers_missed_publish"] == 1
        await until(lambda: service.metrics()["rollouts/num_servers_away"] == 1)
        for i in range(4):
            generation = await service.pool.generate(
                np.arange(5), Sampling(max_tokens=3), mode=LogprobMode.RAW, timeout_s=30, affinity=str(i)
            )
            assert set(generation.samples[0].weight_versions) == {2}
        with ReferenceServer("--model", str(TINY_MODEL), listen=listen_of(two)):
            await until(lambda: [r.version for r in service.pool.replicas] == [2, 2])
            await until(lambda: "caught up with version 2 and serves again" in caplog.text)
            report = await service.publish(checkpoint, step=2)
            assert len(report.committed) == 2 and not report.failed
        await service.close()


async def test_servers_join_and_leave_with_the_file_that_names_them(checkpoint, tmp_path, caplog):
    named = tmp_path / "servers.txt"
    with reference_server() as one, reference_server() as two, ReferenceServer() as other_model:
        named.write_text(f"# ours\n{one.url}\n")
        service = await RolloutService.open(config(f"file://{named}"), TINY_MODEL)
        await service.publish(checkpoint, step=0)
        named.write_text(f"{one.url}  # the first\n\n{two.url}\n")
        await until(lambda: [r.version for r in service.pool.replicas] == [1, 1])
        named.write_text("grpc://nowhere\n")
        await until(lambda: "servers.txt, line 1" in caplog.text)
        assert len(service.pool.replicas) == 2
        named.write_text(f"{two.url}\n{other_model.url}\n")
        await until(lambda: "serves another model" in caplog.text)
        assert one.url not in [r.url for r in service.pool.replicas]
        await service.publish(checkpoint, step=1)
        generation = await service.pool.generate(
            np.arange(5), Sampling(max_tokens=3), mode=LogprobMode.RAW, timeout_s=30
        )
        assert set(generation.samples[0].weight_versions) == {2}
        assert generation.instance_id == service.pool.replicas[0].instance_id
        await service.close()


async def test_a_server_that_starts_after_the_file_named_it_joins_without_a_new_file(checkpoint, tmp_path, caplog):
    named = tmp_path / "servers.txt"
    with reference_server() as one:
        with reference_server() as two:
            address = listen_of(two)
        named.write_text(f"{one.url}\n")
        service = await RolloutService.open(config(f"file://{named}"), TINY_MODEL)
        await service.publish(checkpoint, step=0)
        named.write_text(f"{one.url}\n{two.url}\n")
        await until(lambda: f"{two.url} is in the file of rollout servers and did not join" in caplog.text)
        with ReferenceServer("--model", str(TINY_MODEL), listen=address):
            await until(lambda: [r.version for r in service.pool.replicas] == [1, 1])
        await service.close()


async def test_a_trainer_that_was_replaced_cannot_take_a_server_back_by_its_restart(checkpoint):
    with reference_server() as one, reference_server() as two:
        zombie = await RolloutService.open(config(one.url, two.url), TINY_MODEL)
        await zombie.publish(checkpoint, step=0)
        heir = await RolloutService.open(config(one.url), TINY_MODEL)
        await heir.publish(checkpoint, step=0)
        with pytest.raises(Fenced):
            await zombie.publish(checkpoint, step=1)
        two.kill()
        gone = zombie.pool.replicas[1].instance_id
        with ReferenceServer("--model", str(TINY_MODEL), listen=listen_of(two)):
            await until(lambda: zombie.pool.replicas[1].instance_id != gone)
            with pytest.raises(Fenced):
                await zombie.publish(checkpoint, step=1)
        await heir.publish(checkpoint, step=1)
        await zombie.close()
        await heir.close()
