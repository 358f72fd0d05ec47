"""What every policy backend must do, as tests that each backend runs: subclass `PolicyContract` in a test module.

    class TestFsdp(PolicyContract):
        plugin = PLUGIN

Gradients and AdamW steps are compared with `plain_reference`, files and exports with transformers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from skyrl.train.backends import BackendPlugin
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.policy.batch import TrajectoryBatch
from skyrl.train.policy.contract import LossSpec
from skyrl.train.policy.group import PolicyGroup
from skyrl.train.policy.plain_reference import PlainPolicy

VOCAB = 40
TEMPERATURE = 0.7
FLOAT32, FLOAT64 = "float32", "float64"
GRADIENT_TOLERANCE = {FLOAT32: 1e-6, FLOAT64: 1e-12}  # times the largest gradient
WEIGHT_TOLERANCE = {FLOAT32: 1e-5, FLOAT64: 1e-9}  # after 5 AdamW steps at 3e-4
LOGPROB_TOLERANCE = {FLOAT32: 2e-6, FLOAT64: 1e-12}


class PolicyContract:
    """Set `plugin`; override `config` for an extended configuration, `num_workers` to run on several ranks."""

    plugin: BackendPlugin
    num_workers = 1

    def config(self, tree: dict[str, Any]) -> Any:
        """The configuration from nested public keys."""
        return SkyRLTrainConfig.model_validate(tree)

    # Numbers

    def test_logprobs_equal_the_plain_reference_in_the_order_of_the_batch_in_float32(self, tmp_path: Path) -> None:
        self._compare_logprobs(tmp_path, FLOAT32)

    def test_logprobs_equal_the_plain_reference_in_the_order_of_the_batch_in_float64(self, tmp_path: Path) -> None:
        self._compare_logprobs(tmp_path, FLOAT64)

    def test_gradients_equal_the_plain_reference_in_float32(self, tmp_path: Path) -> None:
        self._compare_gradients(tmp_path, FLOAT32)

    def test_gradients_equal_the_plain_reference_in_float64(self, tmp_path: Path) -> None:
        self._compare_gradients(tmp_path, FLOAT64)

    def test_gradients_of_the_regular_loss_equal_the_plain_reference_in_float64(self, tmp_path: Path) -> None:
        self._compare_gradients(tmp_path, FLOAT64, loss="regular")

    def test_weights_after_five_steps_equal_the_plain_reference_in_float32(self, tmp_path: Path) -> None:
        self._compare_steps(tmp_path, FLOAT32)

    def test_weights_after_five_steps_equal_the_plain_reference_in_float64(self, tmp_path: Path) -> None:
        self._compare_steps(tmp_path, FLOAT64)

    def test_the_gradient_does_not_depend_on_the_size_of_micro_batches(self, tmp_path: Path) -> None:
        model, batch = tiny_model(tmp_path), scored(random_minibatch(4))
        expected: dict[str, torch.Tensor] = {}
        for micro, tokens in ((1, -1), (5, -1), (64, -1), (1, 40)):
            with self.group(model, dtype=FLOAT64, micro=micro, tokens=tokens, reduction="sequence_mean") as (g, cfg):
                ours = g.gradients(batch, spec(cfg))
            expected = expected or PlainPolicy.load(model).gradients(batch, cfg.trainer.algorithm, TEMPERATURE)
            assert_same_gradients(ours, expected, GRADIENT_TOLERANCE[FLOAT64])

    def test_a_loss_that_chooses_tokens_chooses_them_over_the_whole_minibatch(self, tmp_path: Path) -> None:
        """KL-Cov: a fifth of the trained tokens, those of highest covariance, pay |logp - old_logp|."""
        model, batch = tiny_model(tmp_path), scored(random_minibatch(4))
        plain = PlainPolicy.load(model)
        logprobs_T, _ = plain.logprobs(batch, TEMPERATURE)
        trained = [t for t in range(logprobs_T.numel()) if batch.loss_mask_T[t] > 0]
        logprobs, advantages = logprobs_T[trained], batch.require("advantages_T").double()[trained]
        gap = logprobs - batch.require("old_logprobs_T").double()[trained]
        covariance = (advantages - advantages.mean()) * (logprobs - logprobs.mean()).detach()
        paying = covariance >= covariance.sort().values[-int(0.2 * len(trained))]
        loss = (-gap.exp() * advantages + torch.where(paying, gap.abs(), 0.0)).mean()
        names = list(plain.weights)
        grads = torch.autograd.grad(loss, [plain.weights[name] for name in names])
        for micro in (1, 64):
            with self.group(model, micro=micro, loss="kl_cov") as (group, cfg):
                alone = cfg.trainer.algorithm.model_copy(update={"use_kl_loss": False, "use_entropy_loss": False})
                ours = group.gradients(batch, LossSpec(algorithm=alone, temperature=TEMPERATURE))
            assert_same_gradients(ours, dict(zip(names, grads, strict=True)), GRADIENT_TOLERANCE[FLOAT32])

    def test_metrics_are_those_of_the_whole_minibatch(self, tmp_path: Path) -> None:
        model, batch = tiny_model(tmp_path), scored(random_minibatch(5))
        with self.group(model, dtype=FLOAT64, micro=3) as (group, cfg):
            metrics = group.update(batch, spec(cfg))
        plain = PlainPolicy.load(model)
        _, entropy_T = plain.logprobs(batch, TEMPERATURE)
        loss = plain.loss(batch, cfg.trainer.algorithm, TEMPERATURE)
        norm = plain.adamw_step(
            plain.gradients(batch, cfg.trainer.algorithm, TEMPERATURE), cfg.trainer.policy.optimizer_config
        )
        mean_entropy = float((entropy_T.detach() * batch.loss_mask_T).sum() / batch.loss_mask_T.sum())
        assert math.isclose(metrics["policy/final_loss"], float(loss.detach()), rel_tol=1e-9)
        assert math.isclose(metrics["policy/policy_entropy"], mean_entropy, rel_tol=1e-9)
        assert math.isclose(metrics["policy/grad_norm"], norm, rel_tol=1e-6)
        assert math.isclose(metrics["policy/policy_lr"], 3e-4, rel_tol=1e-9)
        assert 0 < metrics["policy/loss_metrics/clip_ratio"] < 1
        assert metrics["policy/num_skipped_updates"] == 0

    def test_a_rank_without_sequences_takes_part_in_the_step(self, tmp_path: Path) -> None:
        model, batch = tiny_model(tmp_path), scored(random_minibatch(6))
        one = batch.select([2])
        with self.group(model, dtype=FLOAT64, micro=2) as (group, cfg):
            ours = group.gradients(one, spec(cfg))
        expected = PlainPolicy.load(model).gradients(one, cfg.trainer.algorithm, TEMPERATURE)
        assert_same_gradients(ours, expected, GRADIENT_TOLERANCE[FLOAT64])

    # Steps that do not happen, and schedules

    def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(self, tmp_path: Path) -> None:
        model, batch = tiny_model(tmp_path), scored(random_minibatch(7))
        broken = batch.with_tensors(advantages_T=torch.full_like(batch.loss_mask_T, math.inf))
        with self.group(model, micro=4, warmup=3) as (group, cfg):
            group.update(batch, spec(cfg))
            before = group.weights()
            metrics = group.update(broken, spec(cfg))
            assert metrics["policy/num_skipped_updates"] == 1 and not math.isfinite(metrics["policy/grad_norm"])
            assert_identical(group.weights(), before)
            group.update(batch, spec(cfg))
            after = group.weights()
        with self.group(model, micro=4, warmup=3) as (group, cfg):
            group.update(batch, spec(cfg))
            group.update(batch, spec(cfg))
            assert_identical(group.weights(), after)

    def test_the_learning_rate_warms_up_over_optimizer_steps(self, tmp_path: Path) -> None:
        model, batch = tiny_model(tmp_path), scored(random_minibatch(8))
        with self.group(model, micro=64, warmup=2) as (group, cfg):
            rates = [group.update(batch, spec(cfg))["policy/policy_lr"] for _ in range(4)]
        assert all(math.isclose(a, b, abs_tol=1e-12) for a, b in zip(rates, (0.0, 1.5e-4, 3e-4, 3e-4), strict=True))

    # Files and exports

    def test_a_resumed_run_continues_bit_for_bit(self, tmp_path: Path) -> None:
        model, batches = tiny_model(tmp_path / "model"), [scored(random_minibatch(10 + i)) for i in range(4)]
        with self.group(model, micro=4, warmup=3) as (group, cfg):
            for batch in batches[:2]:
                group.update(batch, spec(cfg))
            group.save(tmp_path / "saved")
            straight = [group.update(batch, spec(cfg)) for batch in batches[2:]]
            expected = group.weights()
        with self.group(model, micro=4, warmup=3) as (group, cfg):
            group.load(tmp_path / "saved")
            resumed = [group.update(batch, spec(cfg)) for batch in batches[2:]]
            assert_identical(group.weights(), expected)
        assert resumed == straight

    def test_loading_from_a_folder_without_a_checkpoint_names_the_missing_file(self, tmp_path: Path) -> None:
        message = ""
        with self.group(tiny_model(tmp_path / "model")) as (group, _cfg):
            try:
                group.load(tmp_path / "nothing")
            except ValueError as error:
                message = str(error)
        assert str(tmp_path / "nothing") in message

    def test_exported_weights_have_the_names_shapes_and_values_of_the_checkpoint(self, tmp_path: Path) -> None:
        self._compare_export(tiny_model(tmp_path))

    def test_an_untied_head_is_exported_under_its_own_name(self, tmp_path: Path) -> None:
        self._compare_export(tiny_model(tmp_path, tied=False))

    def test_the_hugging_face_export_loads_in_transformers_with_the_trained_weights(self, tmp_path: Path) -> None:
        model, batch = tiny_model(tmp_path / "model"), scored(random_minibatch(9))
        with self.group(model, micro=4) as (group, cfg):
            group.update(batch, spec(cfg))
            group.save_hf(tmp_path / "export")
            trained = group.weights()
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
        assert type(loaded) is Qwen3ForCausalLM and loaded.dtype == torch.float32
        assert_identical(dict(loaded.named_parameters()), trained)

    # Parts

    def _compare_logprobs(self, folder: Path, dtype: str) -> None:
        model, batch = tiny_model(folder), random_minibatch(1)
        with self.group(model, dtype=dtype, micro=3) as (group, _cfg):
            ours = group.logprobs(batch, temperature=TEMPERATURE)
        expected, _ = PlainPolicy.load(model).logprobs(batch, TEMPERATURE)
        assert largest_gap(ours, expected.detach()) < LOGPROB_TOLERANCE[dtype]

    def _compare_gradients(self, folder: Path, dtype: str, loss: str = "dual_clip") -> None:
        model, batch = tiny_model(folder), scored(random_minibatch(2))
        with self.group(model, dtype=dtype, micro=5, loss=loss) as (group, cfg):
            ours = group.gradients(batch, spec(cfg))
        expected = PlainPolicy.load(model).gradients(batch, cfg.trainer.algorithm, TEMPERATURE)
        assert_same_gradients(ours, expected, GRADIENT_TOLERANCE[dtype])

    def _compare_export(self, model: Path) -> None:
        stored = load_file(model / "model.safetensors")
        with self.group(model) as (group, _cfg):
            assert_identical(group.weights(), stored)
            assert {t.name: t.shape for t in group.layout()} == {n: tuple(t.shape) for n, t in stored.items()}
            assert {t.dtype for t in group.layout()} == {"f32"}
            assert [t.name for t in group.layout()] == list(group.weights())

    def _compare_steps(self, folder: Path, dtype: str) -> None:
        model, plain = tiny_model(folder), PlainPolicy.load(folder)
        with self.group(model, dtype=dtype, micro=5) as (group, cfg):
            for i in range(5):
                batch = scored(random_minibatch(20 + i))
                group.update(batch, spec(cfg))
                gradients = plain.gradients(batch, cfg.trainer.algorithm, TEMPERATURE)
                plain.adamw_step(gradients, cfg.trainer.policy.optimizer_config)
            ours = group.weights()
        gap = max(largest_gap(ours[name], weight.detach()) for name, weight in plain.weights.items())
        assert gap < WEIGHT_TOLERANCE[dtype], f"largest difference {gap:.2e}"

    @contextmanager
    def group(
        self,
        model: Path,
        *,
        dtype: str = FLOAT32,
        micro: int = 4,
        tokens: int = -1,
        warmup: int = 0,
        reduction: str = "token_mean",
        loss: str = "dual_clip",
    ) -> Iterator[tuple[PolicyGroup, Any]]:
        """A policy of this backend on `num_workers` ranks, with every term of the loss in use."""
        algorithm = {"policy_loss_type": loss, "loss_reduction": reduction, "use_kl_loss": True, "kl_loss_coef": 0.05}
        optimizer = {"lr": 3e-4, "num_warmup_steps": warmup, "max_grad_norm": 0.5}
        trainer = {
            "device": "cpu",
            "policy": {
                "model": {"path": str(model)},
                "optimizer_config": optimizer,
                "model_config_kwargs": {} if dtype == FLOAT32 else {"dtype": dtype},
            },
            "placement": {"policy_num_gpus_per_node": self.num_workers},
            "algorithm": algorithm | {"use_entropy_loss": True, "eps_clip_high": 0.3},
            "micro_train_batch_size_per_gpu": micro,
            "micro_forward_batch_size_per_gpu": micro,
            "max_tokens_per_microbatch": tokens,
        }
        cfg = self.config({"trainer": trainer})
        group = PolicyGroup.create(cfg, self.plugin, "policy", total_steps=20)
        try:
            yield group, cfg
        finally:
            group.close()


def tiny_model(folder: Path, *, tied: bool = True) -> Path:
    """A Qwen3 of 2 layers x 64 with grouped queries and random weights, saved as transformers saves it."""
    shape = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.05,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3ForCausalLM(shape).save_pretrained(folder)
    return folder


def random_minibatch(seed: int, *, num_prompts: int = 4, num_samples: int = 3) -> TrajectoryBatch:
    """Groups of ragged sequences; some response tokens are observations (mask 0), one response is masked whole."""
    draw = torch.Generator().manual_seed(seed)
    size = num_prompts * num_samples
    prompts_S = torch.randint(2, 9, (num_prompts,), generator=draw).repeat_interleave(num_samples)
    responses_S = torch.randint(1, 12, (size,), generator=draw)
    segments_T = torch.repeat_interleave(torch.arange(size), responses_S)
    mask_T = (torch.rand(segments_T.numel(), generator=draw) < 0.8).float() * (segments_T != 1)
    mask_T[segments_T == 2] = 1.0
    length = int((prompts_S + responses_S).sum())
    return TrajectoryBatch(
        token_ids_N=torch.randint(0, VOCAB, (length,), generator=draw),
        seq_lens_S=prompts_S + responses_S,
        prompt_lens_S=prompts_S,
        group_ids_S=torch.arange(num_prompts).repeat_interleave(num_samples),
        loss_mask_T=mask_T,
        rewards_T=torch.zeros_like(mask_T),
        rollout_logprobs_T=torch.full_like(mask_T, math.nan),
        weight_versions_T=torch.zeros(mask_T.numel(), dtype=torch.int64),
    )


def scored(batch: TrajectoryBatch) -> TrajectoryBatch:
    """With old and reference logprobs around those of a random model, off policy enough that ratios are clipped."""
    draw = torch.Generator().manual_seed(int(batch.token_ids_N.sum()))
    size = batch.loss_mask_T.shape

    def around_uniform(spread: float) -> torch.Tensor:
        return -math.log(VOCAB) + spread * torch.randn(size, generator=draw)

    masked_T = batch.loss_mask_T == 0
    return batch.with_tensors(
        old_logprobs_T=around_uniform(0.6).masked_fill(masked_T, math.nan),
        ref_logprobs_T=around_uniform(0.5),
        advantages_T=torch.randn(size, generator=draw),
    )


def spec(cfg: Any) -> LossSpec:
    """The configured loss at the suite's temperature."""
    return LossSpec(algorithm=cfg.trainer.algorithm, temperature=TEMPERATURE)


def largest_gap(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """max |ours - expected|, in float64."""
    return float((ours.double() - expected.double()).abs().max())


def assert_same_gradients(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    """Equal names, and values within `tolerance` times the largest gradient of all."""
    assert set(ours) == set(expected)
    largest = max(float(g.abs().max()) for g in expected.values())
    gaps = {name: largest_gap(ours[name], g) / largest for name, g in expected.items()}
    worst = max(gaps, key=lambda name: gaps[name])
    assert gaps[worst] < tolerance, f"{worst} differs by {gaps[worst]:.2e} of the largest gradient"


def assert_identical(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Equal names, and values bit for bit."""
    assert set(ours) == set(expected)
    different = [name for name, tensor in expected.items() if not torch.equal(ours[name], tensor)]
    assert not different, f"differ: {different}"
