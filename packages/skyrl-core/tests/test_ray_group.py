"""Policy workers under Ray: what they are given, and what is said when one dies."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import pytest
import ray
import torch
from ray._private import ray_constants
from skyrl.train.algorithms.policy_losses import TokenLoss, register_policy_loss
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.plugins import import_plugins
from skyrl.train.policy import ray_group
from skyrl.train.policy.contract_suite import random_minibatch, scored, spec, tiny_model
from skyrl.train.policy.fsdp.plugin import PLUGIN
from skyrl.train.policy.group import PolicyGroup
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.weights.shm import PREFIX, SHM_DIR
from test_publishing import published

pytestmark = [pytest.mark.ci, pytest.mark.timeout(400)]  # processes that start beside others

PLUGIN_SOURCE = """
import torch
from skyrl.train.algorithms.policy_losses import TokenLoss, register_policy_loss

HERE = 7.0

@lambda function: register_policy_loss("of_a_plugin", function)
def loss(inputs, algorithm):
    return TokenLoss(-inputs.logprobs_T, {"imported": torch.full_like(inputs.logprobs_T, HERE)})
"""

ENVIRON = replace(PLUGIN, environ_prefixes=("PROBE_",), worker_environ=lambda cfg: {"PROBE_A": "1", "PROBE_B": "2"})


def config_of(model, loss_name, plugins=(), **fsdp):
    trainer = {
        "device": "cpu",
        "policy": {"model": {"path": str(model)}, "fsdp_config": fsdp},
        "placement": {"policy_num_gpus_per_node": 2},
        "algorithm": {"policy_loss_type": loss_name, "use_kl_loss": False},
    }
    return SkyRLTrainConfig.model_validate({"trainer": trainer, "environment": {"plugins": plugins}})


@pytest.fixture
def two_ranks(tmp_path, monkeypatch):
    """(config, start): two workers whose loss is `loss_name`."""
    monkeypatch.setenv("PROBE_B", "20")
    started = []

    def start(loss_name, plugins=()):
        cfg = config_of(tiny_model(tmp_path / "model"), loss_name, plugins)
        started.append(PolicyGroup.create(cfg, ENVIRON, "policy", total_steps=1))
        return cfg, started[-1]

    yield start
    for group in started:
        group.close()
        for rank in group._workers._where:
            assert not list(SHM_DIR.glob(f"{PREFIX}.*.{rank['pid']}.*")), "its weights stay in shared memory"


def test_workers_run_in_the_drivers_own_environment_also_under_uv_run(two_ranks, monkeypatch):
    ray.shutdown()
    monkeypatch.delenv(ray_group.UV_ENVIRONMENTS, raising=False)
    monkeypatch.setattr(ray_constants, ray_group.UV_ENVIRONMENTS, True)  # as where ray was imported before skyrl
    two_ranks("regular")
    python = ray.remote(num_cpus=0)(lambda: sys.executable)  # the ranks have all the cores
    assert ray.get(python.remote(), timeout=60) == sys.executable


async def test_workers_have_a_users_loss_and_the_variables_and_publish_their_weights(two_ranks, tmp_path):
    def probing_loss(inputs, algorithm):
        found = float(os.environ["PROBE_A"]) + float(os.environ["PROBE_B"])
        return TokenLoss(-inputs.logprobs_T, {"probe": torch.full_like(inputs.logprobs_T, found)})

    register_policy_loss("probing", probing_loss)
    cfg, group = two_ranks("probing")
    metrics = group.update(scored(random_minibatch(1)), spec(cfg))
    assert metrics["policy/loss_metrics/probe"] == pytest.approx(21.0, abs=1e-4)
    with ReferenceServer("--model", str(tmp_path / "model")) as server:
        assert (await published(server.url, group, version=1))[1] == 1


def test_workers_import_the_users_plugins(two_ranks, tmp_path, monkeypatch):
    """The module lies in the folder that the run was started from, and nowhere else."""
    (tmp_path / "plugin_of_a_test.py").write_text(PLUGIN_SOURCE)
    monkeypatch.chdir(tmp_path)
    import_plugins(["plugin_of_a_test"])
    cfg, group = two_ranks("of_a_plugin", ["plugin_of_a_test"])
    metrics = group.update(scored(random_minibatch(1)), spec(cfg))
    assert metrics["policy/loss_metrics/imported"] == pytest.approx(7.0, abs=1e-4)


async def test_a_worker_that_dies_is_named_with_its_last_lines(two_ranks, tmp_path):
    def deadly_loss(inputs, algorithm):
        if os.environ["RANK"] == "1":
            print("out of patience", flush=True)
            os._exit(3)
        return TokenLoss(-inputs.logprobs_T)

    register_policy_loss("deadly", deadly_loss)
    cfg, group = two_ranks("deadly")
    with ReferenceServer("--model", str(tmp_path / "model")) as server:
        await published(server.url, group, version=1)
    with pytest.raises(RuntimeError, match=r"(?s)policy rank 1 of 2 \(pid \d+ on .*\) died.*out of patience"):
        group.update(scored(random_minibatch(2)), spec(cfg))


@pytest.fixture(scope="class")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="class")
def group(model):
    group = PolicyGroup.create(config_of(model, "regular"), PLUGIN, "policy", total_steps=1)
    yield group
    group.close()


class TestOnePair:
    """Of one group, whose start takes the time."""

    def test_ranks_share_one_copy_of_the_weights_or_have_one_each(self, group, model):
        """fsdp_size: the gradient is the same."""
        batch, cfg = scored(random_minibatch(4)), config_of(model, "regular", fsdp_size=1)
        held, gradients = [], []

        def weights_held(process):
            shards = [p.to_local().numel() for p in process._worker.backend.model.parameters()]
            return sum(shards) / sum(p.numel() for p in process._worker.backend.model.parameters())

        def have_one_each(process):
            place, kind = process._worker.place, type(process._worker)
            process._worker = kind(cfg, PLUGIN.policy_factory, place, "policy", total_steps=1)

        def of_all_ranks(function):
            return ray.get([rank.__ray_call__.remote(function) for rank in group._workers._actors], timeout=60)

        for change in (lambda process: None, have_one_each):
            of_all_ranks(change)
            held.append(of_all_ranks(weights_held))
            gradients.append(group.gradients(batch, spec(cfg)))
        assert held == [[0.5, 0.5], [1.0, 1.0]]
        for name, gradient in gradients[0].items():
            assert torch.allclose(gradients[1][name], gradient, atol=1e-7, rtol=1e-4), name

    def test_what_the_user_did_wrong_arrives_as_the_workers_error(self, group, model):
        with pytest.raises(ValueError, match="policy_loss_type=regularr: known: .*did you mean regular"):
            group.update(scored(random_minibatch(3)), spec(config_of(model, "regularr")))


def test_a_ray_that_was_started_for_a_smaller_run_is_started_anew():
    def cores(workers):
        trainer = {"placement": {"policy_num_gpus_per_node": workers}, "algorithm": {"use_kl_loss": True}}
        ray_group.start_ray(SkyRLTrainConfig.model_validate({"trainer": trainer}))
        return ray.cluster_resources()["CPU"]

    ray.shutdown()
    few = cores(1)
    workers = int(few) + 1
    assert cores(workers) == 2 * workers, "those of the policy and of its reference"
    assert cores(1) == 2 * workers, "one that is large enough stays"
    ray_group.leave_ray()


def test_a_ray_address_where_nobody_answers_is_told_at_once(two_ranks, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    monkeypatch.setattr(ray_group.ray, "is_initialized", lambda: False)
    with pytest.raises(ValueError, match=r"RAY_ADDRESS=127\.0\.0\.1:9: no Ray cluster answers there"):
        two_ranks("regular")
