"""A policy's weights on their way to rollout servers, against real reference servers."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.policy.contract_suite import tiny_model
from skyrl.train.policy.fsdp.plugin import PLUGIN
from skyrl.train.policy.group import PolicyGroup
from skyrl.train.policy.publishing import as_bytes, cast_layouts, tensor_layouts
from skyrl_rollout.client import RolloutClient
from skyrl_rollout.errors import ModelMismatch
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.weights.publisher import PublishTarget


@pytest.fixture
def policy(tmp_path, request):
    model = tiny_model(tmp_path / "model")
    cfg = SkyRLTrainConfig.model_validate(
        {
            "trainer": {"device": "cpu", "policy": {"model": {"path": str(model)}}},
            "generator": {"inference_engine": {"weight_sync_backend": getattr(request, "param", "auto")}},
        }
    )
    group = PolicyGroup.create(cfg, PLUGIN, "policy", total_steps=1)
    yield group
    group.close()


async def published(url, group, *, version, dtype="f32"):
    """The committed version that the server reports after the group published to it."""
    client = await RolloutClient.connect(url)
    epoch = await client.acquire_control("a test")
    targets = [PublishTarget(url, epoch)]
    # called from a running loop on purpose: publishing brings its own
    report = await asyncio.to_thread(group.publish, targets, target_version=version, dtype=dtype, timeout_s=30.0)
    await client.refresh()
    try:
        return report, client.info.weight_version
    finally:
        await client.close()


async def test_a_server_of_the_same_model_takes_the_weights_again_and_again(policy, tmp_path):
    with ReferenceServer("--model", str(tmp_path / "model")) as server:
        for version in (1, 2):
            report, served = await published(server.url, policy, version=version)
            assert served == version
            assert report.nbytes >= sum(t.numel() * 4 for t in policy.weights().values())


@pytest.mark.parametrize(("policy", "kind"), [("delta", "overwrite"), ("nccl", "full")], indirect=["policy"])
async def test_with_deltas_asked_for_only_what_changed_is_sent_again(policy, kind, tmp_path):
    with ReferenceServer("--model", str(tmp_path / "model"), "--delta") as server:
        first, _ = await published(server.url, policy, version=1)
        with torch.no_grad():
            next(policy._workers._worker.backend.model.parameters()).view(-1)[0] += 1  # of this process's own worker
        second, served = await published(server.url, policy, version=2)
    assert (first.kind, second.kind, served) == ("full", kind, 2)
    assert (second.nbytes < first.nbytes) is (kind == "overwrite")


async def test_a_server_that_takes_no_deltas_gets_everything(tmp_path):
    model = tiny_model(tmp_path / "model")
    policy = {"device": "cpu", "policy": {"model": {"path": str(model)}}}
    engine = {"inference_engine": {"weight_sync_backend": "delta"}}
    cfg = SkyRLTrainConfig.model_validate({"trainer": policy, "generator": engine})
    group = PolicyGroup.create(cfg, PLUGIN, "policy", total_steps=1)
    try:
        with ReferenceServer("--model", str(model)) as server:
            await published(server.url, group, version=1)
            report, _ = await published(server.url, group, version=2)
    finally:
        group.close()
    assert report.kind == "full"


async def test_a_server_of_another_model_is_told_which_tensors_differ_before_any_byte_moves(policy):
    with ReferenceServer() as server:
        with pytest.raises(ModelMismatch, match=r"model\.layers\.0"):
            await published(server.url, policy, version=1)
        client = await RolloutClient.connect(server.url)
        assert client.info.weight_version == 0
        await client.close()


def test_bytes_are_those_of_the_tensor_in_the_servers_dtype():
    tensors = [("a", torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T), ("n", torch.tensor([7]))]
    layout = cast_layouts(tensor_layouts(tensors), "bf16")
    assert [(t.name, t.dtype, t.shape) for t in layout] == [("a", "bf16", (2, 2)), ("n", "i64", (1,))]
    sent = dict(as_bytes(layout, tensors))
    assert np.frombuffer(sent["a"], np.uint16).tolist() == [0x3F80, 0x4040, 0x4000, 0x4080]
    assert np.frombuffer(sent["n"], np.int64).tolist() == [7]


def test_a_dtype_that_no_server_has_is_refused(policy):
    with pytest.raises(ValueError, match="'f12'"):
        cast_layouts(policy.layout(), "f12")
