"""Which metric shows that a flag of a recipe did its work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

LOSS = "policy/loss_metrics/"
CORRECTION = "trainer.algorithm.off_policy_correction."

# key -> value of it (or "*": any) -> metrics of a training step.
BY_FLAG: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "trainer.algorithm.policy_loss_type": {
        "importance_sampling": (f"{LOSS}importance_ratio",),
        "*": (f"{LOSS}clip_ratio",),
    },
    "trainer.algorithm.use_kl_loss": {"true": ("policy/policy_kl",)},
    "trainer.algorithm.use_kl_in_reward": {"true": ("loss/avg_kl", "loss/kl_loss_coef")},
    "trainer.algorithm.use_entropy_loss": {"true": ("policy/policy_entropy",)},
    "trainer.algorithm.overlong_buffer_len": {"0": (), "*": ("reward/avg_overlong_penalty",)},
    "trainer.algorithm.dynamic_sampling.type": {"null": (), "*": ("dynamic_sampling/num_batches",)},
    "trainer.algorithm.advantage_estimator": {
        "gae": ("critic/critic_loss", "critic/values_mean"),
        "*": ("loss/avg_raw_advantages_abs",),
    },
    f"{CORRECTION}tis_ratio_type": {"null": (), "*": (f"{LOSS}is_ratio_mean",)},
    f"{CORRECTION}sequence_mask_metric": {"geometric": (f"{LOSS}geo_sequence_mask_masked_ratio",)},
    "trainer.algorithm.use_tis": {"true": (f"{LOSS}tis_token_clip_high_ratio",)},
    "trainer.policy.optimizer_config.lr": {"*": ("policy/policy_lr",)},
    "trainer.fully_async.enabled": {"true": ("async/staleness_mean",)},
    "generator.max_turns": {"1": (), "*": ("generate/tokens_per_turn_mean",)},
}
# Where nothing is trained.
SIMULATED = {"trainer.fully_async.enabled": BY_FLAG["trainer.fully_async.enabled"]}
# Metrics of an evaluation, where there is one.
EVALUATED = {"trainer.eval_before_train": {"true": ("eval/all/avg_score",)}}


def expected(argv: Iterable[str], table: Mapping[str, Mapping[str, tuple[str, ...]]]) -> set[str]:
    """The metrics of every flag among the arguments, the last of each key counting."""
    given = dict(argument.split("=", 1) for argument in argv)
    return {
        metric
        for key, by_value in table.items()
        if key in given
        for metric in by_value.get(given[key].lower(), by_value.get("*", ()))
    }
