"""Which keys decide nothing because of the value of another key, and why: what the report at start says of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from skyrl.train.algorithms.advantages import ADVANTAGE_ESTIMATORS
from skyrl.train.algorithms.anchors import needs_old_logprobs
from skyrl.train.algorithms.critic import uses_critic
from skyrl.train.algorithms.policy_losses import POLICY_LOSSES
from skyrl.train.algorithms.reductions import MICRO_BATCHED

A = "trainer.algorithm"
CORRECTION = f"{A}.off_policy_correction"


@dataclass(frozen=True)
class Idle:
    """Keys (patterns) that decide nothing where `holds(cfg)`, and why."""

    keys: tuple[str, ...]
    holds: Callable[[Any], bool]
    why: str


def other_loss(*readers: str) -> Callable[[Any], bool]:
    """Whether the loss is one of ours that does not read the keys; a user's own may read any."""
    return lambda cfg: cfg.trainer.algorithm.policy_loss_type in POLICY_LOSSES.builtin - set(readers)


def other_estimator(*readers: str) -> Callable[[Any], bool]:
    """Whether the estimator is one of ours that does not read the keys."""
    return lambda cfg: cfg.trainer.algorithm.advantage_estimator in ADVANTAGE_ESTIMATORS.builtin - set(readers)


def other_correction(switch: str, value: str) -> Callable[[Any], bool]:
    """Whether that switch of the correction says something else."""
    return lambda cfg: getattr(cfg.trainer.algorithm.off_policy_correction, switch) != value


def is_constant(role: str) -> Callable[[Any], bool]:
    """Whether the role's learning rate never changes."""
    return lambda cfg: getattr(cfg.trainer, role).optimizer_config.scheduler == "constant"


CRITIC = (
    "trainer.critic.*", "trainer.critic_mini_batch_size", "trainer.placement.critic_*", f"{A}.value_clip",
    f"{A}.value_head_prefix",
)  # fmt: skip

ALGORITHM_IDLE = (
    Idle(
        CRITIC,
        lambda cfg: cfg.trainer.critic.model.path is None,
        "there is no critic (trainer.critic.model.path)",
    ),
    Idle(
        CRITIC,
        lambda cfg: not uses_critic(cfg.trainer),
        f"{A}.advantage_estimator looks at no values: no critic is started",
    ),
    *(
        Idle(
            (f"trainer.{role}.optimizer_config.num_warmup_steps",),
            is_constant(role),
            f"trainer.{role}.optimizer_config.scheduler=constant has no warm-up: take constant_with_warmup",
        )
        for role in ("policy", "critic")
    ),
    Idle(
        ("trainer.ref.*", "trainer.update_ref_every_epoch", "trainer.placement.ref_*",
         "trainer.placement.colocate_policy_ref", f"{A}.kl_loss_coef", f"{A}.kl_estimator_type"),
        lambda cfg: not cfg.trainer.algorithm.needs_reference,
        f"there is no KL term ({A}.use_kl_loss=false, {A}.use_kl_in_reward=false)",
    ),
    Idle(
        (f"{A}.kl_ctrl.*",),
        lambda cfg: not cfg.trainer.algorithm.use_kl_in_reward,
        f"there is no KL penalty on the reward ({A}.use_kl_in_reward=false)",
    ),
    Idle(
        (f"{A}.kl_ctrl.kl_target", f"{A}.kl_ctrl.horizon"),
        lambda cfg: cfg.trainer.algorithm.kl_ctrl.type == "fixed",
        f"the coefficient does not move ({A}.kl_ctrl.type=fixed)",
    ),
    Idle(
        (f"{A}.entropy_loss_coef",),
        lambda cfg: not cfg.trainer.algorithm.use_entropy_loss,
        f"there is no entropy bonus ({A}.use_entropy_loss=false)",
    ),
    Idle((f"{A}.gamma",), other_estimator("gae", "reinforce++"), "the estimator scores whole responses"),
    Idle((f"{A}.lambd",), other_estimator("gae"), f"only {A}.advantage_estimator=gae reads it"),
    Idle((f"{A}.grpo_norm_by_std",), other_estimator("grpo"), f"only {A}.advantage_estimator=grpo reads it"),
    Idle(
        (f"{A}.dynamic_sampling.max_sample_batches", f"{A}.dynamic_sampling.min_replace_ratio"),
        lambda cfg: cfg.trainer.algorithm.dynamic_sampling.type is None,
        f"dynamic sampling is off ({A}.dynamic_sampling.type)",
    ),
    Idle(
        (f"{A}.dynamic_sampling.min_replace_ratio",),
        lambda cfg: cfg.trainer.algorithm.dynamic_sampling.type == "filter",
        f"only {A}.dynamic_sampling.type=replace reads it",
    ),
    Idle(
        (f"{A}.zero_variance_filter_tol",),
        lambda cfg: not cfg.trainer.algorithm.zero_variance_filter,
        f"the zero-variance filter is off ({A}.zero_variance_filter=false)",
    ),
    Idle(
        (f"{A}.overlong_buffer_penalty_factor",),
        lambda cfg: not cfg.trainer.algorithm.overlong_buffer_len,
        f"overlong responses are not punished ({A}.overlong_buffer_len=0)",
    ),
    Idle(
        (f"{A}.old_logprobs",),
        lambda cfg: not needs_old_logprobs(cfg.trainer.algorithm),
        "the loss takes its ratio to the rollout's logprobs",
    ),
    Idle(
        (f"{A}.eps_clip_low", f"{A}.eps_clip_high"),
        other_loss("regular", "dual_clip", "gspo", "clip_cov", "rollout_is"),
        f"{A}.policy_loss_type has bounds of its own or none",
    ),
    Idle((f"{A}.clip_ratio_c",), other_loss("dual_clip"), f"only {A}.policy_loss_type=dual_clip reads it"),
    *(
        Idle((f"{A}.{loss}.*",), other_loss(loss), f"only {A}.policy_loss_type={loss} reads it")
        for loss in ("sapo", "cispo", "clip_cov", "kl_cov", "dppo")
    ),
    Idle(
        (f"{A}.max_seq_len",),
        lambda cfg: cfg.trainer.algorithm.loss_reduction != "seq_mean_token_sum_norm",
        f"only {A}.loss_reduction=seq_mean_token_sum_norm divides by it",
    ),
    *(
        Idle(
            (f"{CORRECTION}.{kind}_tis_ratio_clip_high",),
            other_correction("tis_ratio_type", kind),
            f"only {CORRECTION}.tis_ratio_type={kind} reads it",
        )
        for kind in ("token", "sequence")
    ),
    *(
        Idle(
            (f"{CORRECTION}.{name}_mask_*",),
            other_correction("sequence_mask_metric", kind),
            f"only {CORRECTION}.sequence_mask_metric={kind} reads it",
        )
        for name, kind in (("geo", "geometric"), ("product", "product"))
    ),
    Idle(
        ("trainer.micro_train_batch_size_per_gpu",),
        lambda cfg: cfg.trainer.max_tokens_per_microbatch > 0
        and cfg.trainer.algorithm.loss_reduction != MICRO_BATCHED,
        "trainer.max_tokens_per_microbatch cuts the micro-batches",
    ),
)  # fmt: skip
