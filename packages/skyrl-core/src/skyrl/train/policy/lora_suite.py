"""What every policy backend must do with LoRA, as tests that each backend runs: subclass `LoraContract` in a module.

Gradients and AdamW steps of the adapter are compared with `plain_reference` on weights W + (alpha / rank) * B @ A,
exports with PEFT and transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from skyrl.train.backends import BackendPlugin
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.policy.batch import TrajectoryBatch
from skyrl.train.policy.checkpoint import contents
from skyrl.train.policy.contract_suite import (
    FLOAT32,
    FLOAT64,
    GRADIENT_TOLERANCE,
    TEMPERATURE,
    WEIGHT_TOLERANCE,
    assert_identical,
    assert_same_gradients,
    largest_gap,
    random_minibatch,
    scored,
    spec,
    tiny_model,
)
from skyrl.train.policy.group import PolicyGroup
from skyrl.train.policy.plain_reference import PlainPolicy

RANK, ALPHA = 4, 12
PREFIX = "base_model.model."


class LoraContract:
    """Set `plugin`; override `config` for an extended configuration, `num_workers` to run on several ranks, `dtype`
    where the backend's optimizer is float32."""

    plugin: BackendPlugin
    num_workers = 1
    dtype = FLOAT64

    def config(self, tree: dict[str, Any]) -> Any:
        """The configuration from nested public keys."""
        return SkyRLTrainConfig.model_validate(tree)

    def test_gradients_of_the_adapter_equal_the_plain_reference(self, tmp_path: Path) -> None:
        model, batch = tiny_model(tmp_path), scored(random_minibatch(2))
        with self.group(model, dtype=self.dtype, lr=1e-2) as (group, cfg):
            for i in range(2):  # while B is 0 there is no gradient of A
                group.update(scored(random_minibatch(20 + i)), spec(cfg))
            plain = PlainAdapter(model, factors_of(group.weights()))
            ours = group.gradients(batch, spec(cfg))
        expected = plain.gradients(batch, cfg.trainer.algorithm)
        assert all(gradient.any() for gradient in expected.values())
        assert_same_gradients(ours, expected, GRADIENT_TOLERANCE[self.dtype])

    def test_the_adapter_after_five_steps_equals_the_plain_reference(self, tmp_path: Path) -> None:
        model = tiny_model(tmp_path)
        with self.group(model, dtype=self.dtype) as (group, cfg):
            plain = PlainAdapter(model, factors_of(group.weights()))
            for i in range(5):
                batch = scored(random_minibatch(20 + i))
                group.update(batch, spec(cfg))
                plain.step(plain.gradients(batch, cfg.trainer.algorithm), cfg.trainer.policy.optimizer_config)
            trained = factors_of(group.weights())
        gap = max(largest_gap(trained[name], factor.detach()) for name, factor in plain.factors.items())
        assert gap < WEIGHT_TOLERANCE[self.dtype], f"largest difference {gap:.2e}"

    def test_the_base_never_changes_and_the_adapter_does(self, tmp_path: Path) -> None:
        model = tiny_model(tmp_path)
        stored = load_file(model / "model.safetensors")
        with self.group(model) as (group, cfg):
            before = factors_of(group.weights())
            for i in range(3):
                group.update(scored(random_minibatch(i)), spec(cfg))
            after = group.weights()
            assert {t.name for t in group.layout()} == set(stored)
        assert_identical({name: t for name, t in after.items() if name in stored}, stored)
        assert set(after) == set(stored) | set(before)
        assert all(not torch.equal(after[name], factor) for name, factor in before.items())

    def test_the_adapter_begins_as_nothing_and_is_drawn_from_the_runs_seed(self, tmp_path: Path) -> None:
        model, batch = tiny_model(tmp_path), random_minibatch(1)
        with self.group(model) as (group, _cfg):
            first, logprobs_T = factors_of(group.weights()), group.logprobs(batch, temperature=TEMPERATURE)
        with self.group(model) as (group, _cfg):
            assert_identical(factors_of(group.weights()), first)
        with self.group(model, seed=7) as (group, _cfg):
            other = factors_of(group.weights())
        assert all(not factor.any() for name, factor in first.items() if ".lora_B." in name)
        assert all(not torch.equal(other[name], factor) for name, factor in first.items() if ".lora_A." in name)
        expected, _ = PlainPolicy.load(model).logprobs(batch, TEMPERATURE)
        assert largest_gap(logprobs_T, expected.detach()) < 2e-6

    def test_recomputed_activations_give_the_same_gradient(self, tmp_path: Path) -> None:
        model, batch = tiny_model(tmp_path), scored(random_minibatch(3))
        found = []
        for recompute in ({"gradient_checkpointing": False}, {"gradient_checkpointing_use_reentrant": True}, {}):
            with self.group(model, dtype=self.dtype, **recompute) as (group, cfg):
                found.append(group.gradients(batch, spec(cfg)))
        for other in found[1:]:
            assert_same_gradients(other, found[0], GRADIENT_TOLERANCE[self.dtype])

    def test_a_resumed_run_continues_bit_for_bit_from_the_adapter_alone(self, tmp_path: Path) -> None:
        model, batches = tiny_model(tmp_path / "model"), [scored(random_minibatch(10 + i)) for i in range(4)]
        with self.group(model, dropout=0.1) as (group, cfg):
            for batch in batches[:2]:
                group.update(batch, spec(cfg))
            group.save(tmp_path / "saved")
            straight = [group.update(batch, spec(cfg)) for batch in batches[2:]]
            expected = group.weights()
        with self.group(model, dropout=0.1) as (group, cfg):
            group.load(tmp_path / "saved")
            resumed = [group.update(batch, spec(cfg)) for batch in batches[2:]]
            assert_identical(group.weights(), expected)
        assert resumed == straight
        assert all(".lora_" in name for name in contents.read(tmp_path / "saved").tensors)

    def test_the_export_loads_in_peft_and_merged_in_transformers_and_both_are_the_policy(self, tmp_path: Path) -> None:
        model, batch = tiny_model(tmp_path / "model"), scored(random_minibatch(9))
        with self.group(model, lr=1e-2) as (group, cfg):
            for _ in range(3):
                group.update(batch, spec(cfg))
            group.save_hf(tmp_path / "export")
        base = AutoModelForCausalLM.from_pretrained(model)
        tokens = batch.token_ids_N[:12][None]
        plain = base(tokens).logits
        adapted = PeftModel.from_pretrained(base, tmp_path / "export" / "lora_adapter")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
        assert largest_gap(adapted(tokens).logits, merged(tokens).logits) < 1e-5
        assert largest_gap(adapted(tokens).logits, plain) > 1e-3
        assert adapted.peft_config["default"].base_model_name_or_path == str(model)

    def test_target_modules_that_the_model_does_not_have_are_refused_and_its_own_listed(self, tmp_path: Path) -> None:
        model, told = tiny_model(tmp_path), ""
        try:
            with self.group(model, target_modules=["q_proj", "qkv_proj"]):
                pass
        except ValueError as error:
            told = str(error)
        assert "trainer.policy.model.lora.target_modules: the model has no linear layer qkv_proj" in told
        assert "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj" in told

    def test_only_target_modules_that_are_not_excluded_get_one(self, tmp_path: Path) -> None:
        modules: dict[str, Any] = {
            "target_modules": ["q_proj", "v_proj"],
            "exclude_modules": ["model.layers.0.self_attn.v_proj"],
        }
        with self.group(tiny_model(tmp_path), **modules) as (group, _cfg):
            adapted = {name.removeprefix(PREFIX).split(".lora_")[0] for name in factors_of(group.weights())}
        assert adapted == {
            "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.v_proj",
        }  # fmt: skip

    @contextmanager
    def group(
        self, model: Path, *, dtype: str = FLOAT32, lr: float = 3e-4, seed: int = 42, **keys: Any
    ) -> Iterator[tuple[PolicyGroup, Any]]:
        """A policy with an adapter on `num_workers` ranks; `keys` of LoRA, or of the trainer."""
        ours = ("target_modules", "exclude_modules", "dropout", "init_method")
        lora = {"rank": RANK, "alpha": ALPHA} | {name: keys.pop(name) for name in ours if name in keys}
        trainer = {
            "device": "cpu",
            "seed": seed,
            "policy": {
                "model": {"path": str(model), "lora": lora},
                "optimizer_config": {"lr": lr, "max_grad_norm": 0.5},
                "model_config_kwargs": {} if dtype == FLOAT32 else {"dtype": dtype},
            },
            "placement": {"policy_num_gpus_per_node": self.num_workers},
            "algorithm": {"policy_loss_type": "dual_clip", "use_kl_loss": True, "kl_loss_coef": 0.05},
            "micro_train_batch_size_per_gpu": 5,
            "micro_forward_batch_size_per_gpu": 5,
        }
        cfg = self.config({"trainer": trainer | keys})
        group = PolicyGroup.create(cfg, self.plugin, "policy", total_steps=20)
        try:
            yield group, cfg
        finally:
            group.close()


class PlainAdapter:
    """A and B beside the plain reference's frozen weights, trained by autograd through W + (alpha / rank) * B @ A."""

    def __init__(self, model: Path, factors: dict[str, torch.Tensor]) -> None:
        self.base = PlainPolicy.load(model)
        self.factors = {name: factor.double().requires_grad_() for name, factor in factors.items()}
        # AdamW of the plain reference, over the factors
        self._optimizer = PlainPolicy({}, self.factors)

    def gradients(self, batch: TrajectoryBatch, algorithm: Any) -> dict[str, torch.Tensor]:
        weights = {name: weight.detach() for name, weight in self.base.weights.items()}
        for name in self.factors:
            if ".lora_A." in name:
                module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
                change = self.factors[name.replace(".lora_A.", ".lora_B.")] @ self.factors[name]
                weights[f"{module}.weight"] = weights[f"{module}.weight"] + change * (ALPHA / RANK)
        loss = PlainPolicy(self.base.shape, weights).loss(batch, algorithm, TEMPERATURE)
        return dict(zip(self.factors, torch.autograd.grad(loss, list(self.factors.values())), strict=True))

    def step(self, gradients: dict[str, torch.Tensor], optimizer: Any) -> None:
        self._optimizer.adamw_step(gradients, optimizer)


def factors_of(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The adapter's tensors among a policy's."""
    return {name: t for name, t in weights.items() if name.startswith(PREFIX)}
