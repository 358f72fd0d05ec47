"""Rules of `trainer.mode` and of step-wise trajectories: what each way of rolling out excludes, needs or leaves out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from skyrl.train.algorithms.anchors import anchored_on_rollout
from skyrl.train.algorithms.policy_losses import POLICY_LOSSES
from skyrl.train.config.idle import A, Idle

F = "trainer.fully_async"
CORRECTING = "rollout_is, dppo, cispo with its cispo_anchor=rollout, or one of your own"


def mode(cfg: Any) -> Iterator[str]:
    """One mode, under its two spellings, and the devices that it needs."""
    trainer = cfg.trainer
    if trainer.fully_async.enabled and trainer.mode != "fully_async":
        yield f"{F}.enabled=true contradicts trainer.mode={trainer.mode}: leave one of them out"
    if trainer.mode in ("one_step_off", "fully_async") and trainer.placement.colocate_all:
        yield (
            f"trainer.placement.colocate_all=true does not go with trainer.mode={trainer.mode}: servers and trainer "
            f"work at the same time; leave it out"
        )
    if trainer.mode == "generate" and not cfg.data.val_data:
        yield "trainer.mode=generate rolls out data.val_data, which is empty: name at least one file"


def fully_async(cfg: Any) -> Iterator[str]:
    """Numbers that keep the workers busy and the staleness bounded, and a loss that corrects for it."""
    trainer = cfg.trainer
    if trainer.mode != "fully_async":
        return
    settings, algorithm, mini = trainer.fully_async, trainer.algorithm, trainer.policy_mini_batch_size
    if trainer.train_batch_size != mini:
        yield (
            f"trainer.train_batch_size={trainer.train_batch_size} must equal trainer.policy_mini_batch_size={mini} "
            f"with trainer.mode=fully_async: weights are published after every mini-batch"
        )
    workers, most = settings.num_parallel_generation_workers, mini * (settings.max_staleness_steps + 1)
    if not mini <= workers <= most:
        yield (
            f"{F}.num_parallel_generation_workers={workers}: expected {mini} to {most}, from trainer."
            f"policy_mini_batch_size to that times ({F}.max_staleness_steps + 1): fewer could not fill a batch, and "
            f"more would never all work"
        )
    if algorithm.dynamic_sampling.type is not None:
        yield (
            f"{A}.dynamic_sampling.type={algorithm.dynamic_sampling.type} samples whole batches, and trainer.mode="
            f"fully_async samples group by group: use {F}.sample_full_batch with {A}.zero_variance_filter"
        )
    if settings.sample_full_batch and not algorithm.zero_variance_filter:
        yield f"{F}.sample_full_batch=true needs {A}.zero_variance_filter=true, which says what is dropped"
    own = algorithm.policy_loss_type not in POLICY_LOSSES.builtin
    if not (own or anchored_on_rollout(algorithm) or algorithm.old_logprobs == "rollout"):
        yield (
            f"{A}.policy_loss_type={algorithm.policy_loss_type} takes every sample for the policy's own, and with "
            f"trainer.mode=fully_async they are several versions old: take {CORRECTING}, or set "
            f"{A}.old_logprobs=rollout"
        )


def step_wise(cfg: Any) -> Iterator[str]:
    """What has no meaning where each turn is a sample of its own."""
    generator, algorithm = cfg.generator, cfg.trainer.algorithm
    key = "generator.step_wise_trajectories=true"
    if generator.merge_stepwise_output and not generator.step_wise_trajectories:
        yield f"generator.merge_stepwise_output=true needs {key}: there are no steps to merge"
    if not generator.step_wise_trajectories:
        return
    if algorithm.advantage_estimator in ("gae", "reinforce++"):
        yield (
            f"{A}.advantage_estimator={algorithm.advantage_estimator} follows rewards from token to token, which "
            f"{key} cuts into samples: take grpo, rloo or maxrl"
        )
    if algorithm.loss_reduction == "token_mean_legacy":
        yield (
            f"{A}.loss_reduction=token_mean_legacy depends on how a batch is cut, and with {key} the number of samples "
            f"varies from batch to batch: take token_mean"
        )


RULES: tuple[Callable[[Any], Iterator[str]], ...] = (mode, fully_async, step_wise)


def generates_only(cfg: Any) -> bool:
    """Whether nothing is trained."""
    return cfg.trainer.mode == "generate"


# Evaluation follows the training's length, and nothing else of its sampling.
SAMPLING_ONLY = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "additional_kwargs")

MODE_IDLE = (
    Idle(
        (f"{F}.*",), lambda cfg: cfg.trainer.mode != "fully_async",
        "rollouts are not fully asynchronous (trainer.mode, trainer.fully_async.enabled)",
    ),
    Idle(
        (f"{F}.simulate_training_step_seconds", f"{F}.simulate_weight_sync_seconds"),
        lambda cfg: not cfg.trainer.fully_async.simulate_training,
        f"the training is real ({F}.simulate_training=false)",
    ),
    Idle(
        ("generator.merge_stepwise_output",), lambda cfg: not cfg.generator.step_wise_trajectories,
        "a trajectory is one sample (generator.step_wise_trajectories=false)",
    ),
    Idle(
        ("data.train_data", *(f"generator.sampling_params.{name}" for name in SAMPLING_ONLY),
         "generator.n_samples_per_prompt", f"{A}.*",
         "trainer.policy.optimizer_config.*", "trainer.policy.fsdp_config.*", "trainer.ref.*", "trainer.placement.*",
         "trainer.*batch*", "trainer.epochs", "trainer.max_training_steps", "trainer.eval_before_train",
         "trainer.eval_interval", "trainer.ckpt*", "trainer.max_ckpts_to_keep", "trainer.hf_save_interval",
         "trainer.resume_*", "trainer.dump_data_batch", "trainer.print_example_interval"),
        generates_only, "nothing is trained (trainer.mode=generate)",
    ),
)  # fmt: skip
"""Keys that decide nothing in some modes."""
