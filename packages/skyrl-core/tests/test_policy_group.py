"""One policy worker in this process: configuration that must change what it does, and errors that name the key."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from skyrl.train.algorithms.advantages import estimate
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.policy.contract import LossSpec
from skyrl.train.policy.contract_suite import assert_identical, random_minibatch, scored, spec, tiny_model
from skyrl.train.policy.fsdp.plugin import PLUGIN, WHOLE, report
from skyrl.train.policy.group import PolicyGroup
from torch.testing import assert_close


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def config(model: Path, **trainer):
    policy = {"model": {"path": str(model)}, "optimizer_config": {"lr": 1e-3}} | trainer.pop("policy", {})
    common = {"device": "cpu", "micro_train_batch_size_per_gpu": 4, "micro_forward_batch_size_per_gpu": 8}
    return SkyRLTrainConfig.model_validate({"trainer": common | {"policy": policy} | trainer})


@pytest.fixture
def start():
    started = []

    def _start(cfg, role="policy"):
        started.append(PolicyGroup.create(cfg, PLUGIN, role, total_steps=10))
        return started[-1]

    yield _start
    for group in started:
        group.close()


def test_on_policy_the_ratio_is_1_at_any_temperature_and_the_reference_has_no_divergence(model, start):
    cfg = config(model, algorithm={"use_kl_loss": True})
    policy, reference = start(cfg), start(cfg, "ref")
    batch = random_minibatch(1)
    old = policy.logprobs(batch, temperature=0.5)
    batch = batch.with_tensors(old_logprobs_T=old, ref_logprobs_T=reference.logprobs(batch, temperature=0.5))
    batch = batch.with_tensors(advantages_T=torch.ones_like(batch.loss_mask_T))
    metrics = policy.update(batch, LossSpec(cfg.trainer.algorithm, temperature=0.5))
    assert metrics["policy/policy_loss"] == pytest.approx(-1.0, abs=1e-6)
    assert metrics["policy/loss_metrics/clip_ratio"] == 0
    assert metrics["policy/policy_kl"] == pytest.approx(0.0, abs=1e-10)


def test_updates_raise_the_probability_of_rewarded_samples(model, start):
    cfg = config(model, algorithm={"use_kl_loss": False})
    policy, batch = start(cfg), random_minibatch(2)
    rewards = torch.zeros_like(batch.rewards_T)
    ends = torch.cumsum(batch.response_lens_S, 0) - 1
    rewards[ends[::3]] = 1.0
    batch = estimate(batch.with_tensors(rewards_T=rewards), cfg.trainer.algorithm)
    before = policy.logprobs(batch, temperature=1.0)
    for _ in range(3):
        policy.update(batch.with_tensors(old_logprobs_T=policy.logprobs(batch, temperature=1.0)), spec(cfg))
    gain = (policy.logprobs(batch, temperature=1.0) - before) * batch.loss_mask_T
    assert gain[batch.advantages_T > 0].mean() > 0 > gain[batch.advantages_T < 0].mean()


def test_gradient_checkpointing_and_chunked_logprobs_do_not_change_the_gradient(model, start):
    batch = scored(random_minibatch(3))
    plain = config(model, gradient_checkpointing=False)
    frugal = config(model, gradient_checkpointing=True, logprobs_chunk_size=3)
    expected, ours = (start(cfg).gradients(batch, spec(cfg)) for cfg in (plain, frugal))
    largest = max(float(g.abs().max()) for g in expected.values())
    for name, gradient in expected.items():
        assert_close(ours[name], gradient, atol=1e-7 * largest, rtol=1e-5)


def test_explicit_mixed_precision_computes_in_bfloat16_over_float32_weights(model, start):
    batch = random_minibatch(4)
    exact = start(config(model)).logprobs(batch, temperature=1.0)
    mixed = start(config(model, policy={"model": {"path": str(model)}, "fsdp_config": {"mixed_precision": {}}}))
    rough = mixed.logprobs(batch, temperature=1.0)
    assert 1e-5 < (exact - rough).abs().max() < 0.1
    assert {t.dtype for t in mixed.weights().values()} == {torch.float32}


def test_a_mixed_precision_policy_exports_the_same_weights_and_resumes(model, start, tmp_path):
    policy = {"model": {"path": str(model)}, "fsdp_config": {"mixed_precision": {}}}
    first, second = start(config(model, policy=policy)), start(config(model, policy=policy))
    cfg, batch = config(model, policy=policy), scored(random_minibatch(5))
    first.update(batch, spec(cfg))
    first.save(tmp_path)
    second.load(tmp_path)
    assert_identical(second.weights(), first.weights())
    assert first.update(batch, spec(cfg)) == second.update(batch, spec(cfg))


def test_settings_of_the_optimizer_reach_it(model, start):
    batch = scored(random_minibatch(6))

    def after_two(**optimizer):
        cfg = config(model, policy={"model": {"path": str(model)}, "optimizer_config": {"lr": 1e-3} | optimizer})
        group = start(cfg)
        for _ in range(2):
            group.update(batch, spec(cfg))
        return group.weights()["model.norm.weight"]

    base = after_two()
    for changed in (
        {"lr": 1e-4},
        {"adam_betas": [0.5, 0.9]},
        {"weight_decay": 0.5},
        {"max_grad_norm": 1e-9},
        {"num_warmup_steps": 5},
        {"scheduler": "cosine"},
    ):
        assert not torch.equal(after_two(**changed), base), changed


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"policy": {"model": {"path": "/no/such/model"}}}, "/no/such/model does not exist"),
        ({"policy": {"model": {"path": str(Path(__file__).parent)}}}, "no config.json"),
        ({"device": "cuda"}, "trainer.device=cuda"),
        ({"policy": {"optimizer_config": {"scheduler": "zigzag"}}}, "optimizer_config.scheduler.*zigzag"),
        ({"policy": {"model_config_kwargs": {"dtype": "int8"}}}, "dtype='int8'"),
        (
            {
                "policy": {
                    "fsdp_config": {"mixed_precision": {}, "wrap_policy": {"transformer_layer_cls_to_wrap": ["X"]}}
                }
            },
            "transformer_layer_cls_to_wrap",
        ),
        ({"policy": {"fsdp_config": {"mixed_precision": {}, "fsdp_size": 3}}}, "fsdp_size=3 must divide the 1"),
    ],
)
def test_what_cannot_be_built_is_refused_with_its_key_and_leaves_the_process_usable(model, start, trainer, message):
    if trainer.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    trainer = {**trainer, "policy": {"model": {"path": str(model)}} | trainer.get("policy", {})}
    with pytest.raises(ValueError, match=message):
        start(config(model, **trainer))
    assert start(config(model)).num_workers == 1


def test_a_minibatch_that_was_not_scored_is_refused(model, start):
    cfg = config(model)
    with pytest.raises(ValueError, match="no old_logprobs_T"):
        start(cfg).update(random_minibatch(7), spec(cfg))


def test_the_kl_loss_without_reference_logprobs_is_refused(model, start):
    cfg = config(model, algorithm={"use_kl_loss": True})
    batch = scored(random_minibatch(8))
    with pytest.raises(ValueError, match="ref_logprobs_T"):
        start(cfg).update(batch.with_tensors(ref_logprobs_T=None), spec(cfg))


def test_the_report_tells_honoured_mapped_and_unused_keys_apart(model):
    keys = ("trainer.policy.optimizer_config.lr", "trainer.strategy", "trainer.bf16")
    found = report(config(model), keys)
    assert found.honoured == keys[:1]
    assert list(found.mapped) == [keys[1]] and list(found.unused) == [keys[2]]


def test_how_a_model_is_cut_is_listed_as_unused_where_it_stays_whole(model):
    keys = tuple(f"trainer.policy.fsdp_config.{name}" for name in ("fsdp_size", "wrap_policy.x"))
    assert report(config(model), keys).unused == dict.fromkeys(keys, WHOLE)
    for cut in (
        {"placement": {"policy_num_gpus_per_node": 2}},
        {"policy": {"model": {"path": str(model)}, "fsdp_config": {"mixed_precision": {}}}},
    ):
        assert report(config(model, **cut), keys).honoured == keys
