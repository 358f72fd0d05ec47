"""What every backend's critic must do, as tests that each backend runs: subclass `CriticContract` in a test module.

    class TestFsdpCritic(CriticContract):
        plugin = PLUGIN

Values, gradients and AdamW steps are compared with `plain_reference.PlainCritic`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from skyrl.train.backends import BackendPlugin
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.policy.batch import TrajectoryBatch
from skyrl.train.policy.contract_suite import (
    FLOAT32,
    FLOAT64,
    GRADIENT_TOLERANCE,
    LOGPROB_TOLERANCE,
    TEMPERATURE,
    WEIGHT_TOLERANCE,
    assert_identical,
    assert_same_gradients,
    largest_gap,
    random_minibatch,
    spec,
    tiny_model,
)
from skyrl.train.policy.critic import CriticGroup
from skyrl.train.policy.plain_reference import PlainCritic

HEAD = "value_head.weight"


class CriticContract:
    """Set `plugin`; override `config` for an extended configuration, `num_workers` to run on several ranks, `dtype` for
    a backend whose optimizer has no float64."""

    plugin: BackendPlugin
    num_workers = 1
    dtype = FLOAT64

    def config(self, tree: dict[str, Any]) -> Any:
        """The configuration from nested public keys."""
        return SkyRLTrainConfig.model_validate(tree)

    # Numbers

    def test_values_and_gradients_equal_the_plain_reference_for_any_micro_batches(self, tmp_path: Path) -> None:
        # float32 arithmetic alone takes 0.3 to 1 of the tolerance, depending on the batch
        model, batch = tiny_critic(tmp_path), taught(random_minibatch(5))
        for micro, tokens in ((1, -1), (5, -1), (64, -1), (1, 40)):
            plain = PlainCritic.load(model)
            with self.critic(model, micro=micro, tokens=tokens) as (critic, cfg):
                values = critic.values(batch)
                ours = critic.gradients(batch, spec(cfg))
            assert largest_gap(values, plain.values(batch).detach()) < LOGPROB_TOLERANCE[self.dtype]
            expected = plain.gradients(batch, cfg.trainer.algorithm, TEMPERATURE)
            assert_same_gradients(ours, expected, GRADIENT_TOLERANCE[self.dtype])

    def test_weights_after_five_critic_steps_equal_the_plain_reference(self, tmp_path: Path) -> None:
        model, plain = tiny_critic(tmp_path), PlainCritic.load(tmp_path)
        with self.critic(model, micro=5) as (critic, cfg):
            for i in range(5):
                batch = taught(random_minibatch(30 + i))
                loss = float(plain.loss(batch, cfg.trainer.algorithm, TEMPERATURE).detach())
                mean = float((plain.values(batch).detach() * batch.loss_mask_T).sum() / batch.loss_mask_T.sum())
                norm = plain.adamw_step(
                    plain.gradients(batch, cfg.trainer.algorithm, TEMPERATURE), cfg.trainer.critic.optimizer_config
                )
                metrics = critic.update(batch, spec(cfg))
                near = 1e-8 if self.dtype == FLOAT64 else 1e-4
                assert math.isclose(metrics["critic/critic_loss"], loss, rel_tol=near)
                assert math.isclose(metrics["critic/values_mean"], mean, rel_tol=near, abs_tol=near / 5)
                assert math.isclose(metrics["critic/grad_norm"], norm, rel_tol=max(near, 1e-6))
                assert math.isclose(metrics["critic/critic_lr"], 3e-4, rel_tol=1e-9)
                assert 0 < metrics["critic/values_clipfrac"] < 1
                assert not [name for name in metrics if not name.startswith("critic/")]
            ours = critic.weights()
        gap = max(largest_gap(ours[name], weight.detach()) for name, weight in plain.weights.items())
        assert gap < WEIGHT_TOLERANCE[self.dtype], f"largest difference {gap:.2e}"

    def test_a_rank_without_sequences_takes_part_in_the_critics_step(self, tmp_path: Path) -> None:
        model, one = tiny_critic(tmp_path), taught(random_minibatch(6)).select([2])
        with self.critic(model, micro=2) as (critic, cfg):
            ours = critic.gradients(one, spec(cfg))
        expected = PlainCritic.load(model).gradients(one, cfg.trainer.algorithm, TEMPERATURE)
        assert_same_gradients(ours, expected, GRADIENT_TOLERANCE[self.dtype])

    # Steps that do not happen, files, heads

    def test_a_critics_gradient_that_is_not_finite_changes_nothing_and_is_counted(self, tmp_path: Path) -> None:
        model, batch = tiny_critic(tmp_path), taught(random_minibatch(7))
        broken = batch.with_tensors(returns_T=torch.full_like(batch.loss_mask_T, math.inf))
        with self.critic(model) as (critic, cfg):
            critic.update(batch, spec(cfg))
            before = critic.weights()
            metrics = critic.update(broken, spec(cfg))
            assert metrics["critic/num_skipped_updates"] == 1 and not math.isfinite(metrics["critic/grad_norm"])
            assert_identical(critic.weights(), before)

    def test_a_resumed_critic_continues_bit_for_bit(self, tmp_path: Path) -> None:
        model, batches = tiny_critic(tmp_path / "model"), [taught(random_minibatch(10 + i)) for i in range(3)]
        with self.critic(model) as (critic, cfg):
            critic.update(batches[0], spec(cfg))
            critic.save(tmp_path / "saved")
            straight = [critic.update(batch, spec(cfg)) for batch in batches[1:]]
            expected = critic.weights()
        with self.critic(model) as (critic, cfg):
            critic.load(tmp_path / "saved")
            assert [critic.update(batch, spec(cfg)) for batch in batches[1:]] == straight
            assert_identical(critic.weights(), expected)

    def test_an_exported_critic_is_a_model_that_a_critic_starts_from(self, tmp_path: Path) -> None:
        """From a causal LM without a head, whose first values are those of a head drawn by the run's seed."""
        causal, batch = tiny_model(tmp_path / "causal", tied=False), taught(random_minibatch(9))
        with self.critic(causal) as (critic, cfg):
            drawn = critic.weights()[HEAD]
            assert 0.5 < float(drawn.std()) * 65 < 2 and float(critic.values(batch).abs().max()) < 1
            critic.update(batch, spec(cfg))
            critic.save_hf(tmp_path / "export")
            trained, values = critic.weights(), critic.values(batch)
        assert "lm_head.weight" not in trained
        with self.critic(tmp_path / "export") as (critic, _cfg):
            started = critic.weights()
            again = critic.values(batch)
        if self.dtype == FLOAT32:
            assert_identical(started, trained)
        assert largest_gap(again, values) < LOGPROB_TOLERANCE[self.dtype]

    @contextmanager
    def critic(self, model: Path, *, micro: int = 4, tokens: int = -1) -> Iterator[tuple[CriticGroup, Any]]:
        """A critic of this backend on `num_workers` ranks."""
        trainer = {
            "device": "cpu",
            "policy": {"model": {"path": str(model)}},
            "critic": {
                "model": {"path": str(model)},
                "optimizer_config": {"lr": 3e-4, "max_grad_norm": 0.5},
                "model_config_kwargs": {} if self.dtype == FLOAT32 else {"dtype": self.dtype},
            },
            "placement": {"critic_num_gpus_per_node": self.num_workers},
            "algorithm": {"advantage_estimator": "gae", "use_kl_loss": False, "value_clip": 0.3},
            "micro_train_batch_size_per_gpu": micro,
            "micro_forward_batch_size_per_gpu": micro,
            "max_tokens_per_microbatch": tokens,
        }
        cfg = self.config({"trainer": trainer})
        critic = CriticGroup.create(cfg, self.plugin, "critic", total_steps=20)
        try:
            yield critic, cfg
        finally:
            critic.close()


def tiny_critic(folder: Path) -> Path:
    """`tiny_model` with a value head that says something already."""
    tiny_model(folder)
    tensors = load_file(folder / "model.safetensors")
    draw = torch.Generator().manual_seed(5)
    tensors[HEAD] = 0.1 * torch.randn(1, tensors["model.norm.weight"].numel(), generator=draw)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def taught(batch: TrajectoryBatch) -> TrajectoryBatch:
    """With old values and returns around 0, far enough apart that errors are clipped."""
    draw = torch.Generator().manual_seed(int(batch.token_ids_N.sum()))
    size = batch.loss_mask_T.shape
    return batch.with_tensors(
        values_T=0.7 * torch.randn(size, generator=draw), returns_T=torch.randn(size, generator=draw)
    )
