"""How rewards become gradients (`trainer.algorithm.*`)."""

from __future__ import annotations

from typing import Literal

from skyrl.train.config.part import ConfigPart, key, section


class KlControlConfig(ConfigPart):
    """`trainer.algorithm.kl_ctrl.*`: how the coefficient of the KL penalty on the reward moves."""

    type: str = key("fixed", "fixed, or adaptive: the coefficient follows the measured KL.")
    kl_target: float = key(0.1, "The KL that an adaptive coefficient aims at, in nats per token.", gt=0)
    horizon: int = key(10000, "Samples over which an adaptive coefficient moves by a factor of e at most.", gt=0)


class DynamicSamplingConfig(ConfigPart):
    """`trainer.algorithm.dynamic_sampling.*`: what becomes of prompts whose samples all got the same reward."""

    type: str | None = key(None, "filter: sample until the batch is full without them; replace: by copies of others.")
    max_sample_batches: int = key(30, "Batches that one step samples at most.", ge=1)
    min_replace_ratio: float = key(
        0.3, "replace: a batch with no more than this share of useful prompts is sampled anew.", ge=0, lt=1
    )


class OffPolicyCorrectionConfig(ConfigPart):
    """`trainer.algorithm.off_policy_correction.*`: the trainer's old policy against the servers' sampling policy."""

    tis_ratio_type: str | None = key(None, "Multiply each token's loss by a truncated ratio: token or sequence.")
    token_tis_ratio_clip_high: float = key(2.0, "tis_ratio_type=token: the ratio is at most this.", gt=0)
    sequence_tis_ratio_clip_high: float = key(5.0, "tis_ratio_type=sequence: the ratio is at most this.", gt=0)
    sequence_mask_metric: str | None = key(None, "Leave out whole sequences by their ratio: product or geometric.")
    geo_mask_high: float = key(1.01, "geometric: sequences with a higher mean ratio are left out.", gt=0)
    geo_mask_low: float = key(0.99, "geometric: sequences with a lower mean ratio are left out.", ge=0)
    product_mask_high: float = key(2.0, "product: sequences with a higher ratio are left out.", gt=0)
    product_mask_low: float = key(0.5, "product: sequences with a lower ratio are left out.", ge=0)
    outlier_token_is_threshold_low: float | None = key(
        None, "A sequence with any token below this ratio is left out.", ge=0
    )
    outlier_token_is_threshold_high: float | None = key(
        None, "A sequence with any token above this ratio is left out.", gt=0
    )
    token_mask_is_threshold_low: float | None = key(None, "Tokens below this ratio are left out.", ge=0)
    token_mask_is_threshold_high: float | None = key(None, "Tokens above this ratio are left out.", gt=0)


class SapoConfig(ConfigPart):
    """`trainer.algorithm.sapo.*`."""

    tau_pos: float = key(1.0, "Steepness of the gate where the advantage is positive.", gt=0)
    tau_neg: float = key(1.05, "Steepness of the gate elsewhere.", gt=0)


class CispoConfig(ConfigPart):
    """`trainer.algorithm.cispo.*`."""

    cispo_eps_clip_low: float = key(1.0, "The weight is clipped below at 1 - this.", ge=0)
    cispo_eps_clip_high: float = key(4.0, "The weight is clipped above at 1 + this.", ge=0)
    cispo_anchor: Literal["old", "rollout"] = key(
        "old", "What the ratio is taken to: the policy before the update, or the servers' sampling policy."
    )


class ClipCovConfig(ConfigPart):
    """`trainer.algorithm.clip_cov.*`."""

    clip_ratio: float = key(2e-4, "Share of tokens that lose their gradient.", ge=0, le=1)
    clip_cov_lb: float = key(1.0, "Tokens are drawn among those with a higher covariance than this.")
    clip_cov_ub: float = key(5.0, "Tokens are drawn among those with a lower covariance than this.")


class KlCovConfig(ConfigPart):
    """`trainer.algorithm.kl_cov.*`."""

    kl_cov_frac: float = key(0.2, "Share of tokens, those of highest covariance, that get the KL penalty.", ge=0, le=1)
    ppo_kl_coef: float = key(1.0, "Coefficient of that penalty.", ge=0)


class DppoConfig(ConfigPart):
    """`trainer.algorithm.dppo.*`."""

    dppo_type: str = key("binary_tv", "Divergence of the sampled token's probability: binary_tv or binary_kl.")
    delta_low: float = key(0.2, "Where the advantage is negative: no gradient above this divergence.", ge=0)
    delta_high: float = key(0.2, "Where the advantage is positive: no gradient above this divergence.", ge=0)


class AlgorithmConfig(ConfigPart):
    """`trainer.algorithm.*`. Names of functions index the tables in `skyrl.train.algorithms`."""

    advantage_estimator: str = key("grpo", "Advantage estimator.")
    policy_loss_type: str = key("regular", "Policy loss.")
    loss_reduction: str = key("token_mean", "How token losses become one number.")
    old_logprobs: Literal["recompute", "rollout"] = key(
        "recompute",
        "Where the old logprobs of the ratio come from: a forward pass of the trainer, or the rollout server "
        "(an addition of this project).",
    )
    temperature: float | None = key(
        None,
        "Divides the logits in the trainer; unset means generator.sampling_params.temperature.",
    )

    use_kl_loss: bool = key(True, "Add a KL term against the reference model to the loss.")
    use_kl_in_reward: bool = key(False, "Subtract the KL to the reference model from the reward of each token.")
    kl_loss_coef: float = key(1e-3, "Coefficient of the KL term, in the loss or in the reward.", ge=0)
    kl_estimator_type: str = key("k3", "KL estimator.")
    kl_ctrl: KlControlConfig = section(KlControlConfig)

    use_entropy_loss: bool = key(False, "Add an entropy bonus.")
    entropy_loss_coef: float = key(0.01, "Coefficient of the entropy bonus.", ge=0)

    gamma: float = key(1.0, "Discount per sampled token, of the estimators that look at single tokens.", ge=0, le=1)
    lambd: float = key(1.0, "Lambda of generalised advantage estimation.", ge=0, le=1)
    value_clip: float | None = key(
        0.2, "A critic's value moves by no more than this before its error counts in full; null: no bound.", ge=0
    )
    value_head_prefix: str = key(
        "value_head", "Name of the critic's head: its checkpoint has NAME.weight, or a new head is drawn.", min_length=1
    )
    grpo_norm_by_std: bool = key(True, "Divide a group's advantages by the standard deviation of its rewards.")
    advantage_batch_normalize: bool = key(False, "Whiten advantages over the batch.")

    dynamic_sampling: DynamicSamplingConfig = section(DynamicSamplingConfig)
    zero_variance_filter: bool = key(False, "Leave groups out of the loss whose samples all got the same reward.")
    zero_variance_filter_tol: float = key(1e-6, "Rewards that differ by no more than this count as the same.", ge=0)
    overlong_buffer_len: int = key(
        0,
        "The last so many tokens below generator.sampling_params.max_generate_length cost reward, in proportion; "
        "0: none (DAPO's soft punishment).",
        ge=0,
    )
    overlong_buffer_penalty_factor: float = key(1.0, "What the whole of that buffer costs.", ge=0)

    eps_clip_low: float = key(0.2, "The ratio is clipped below at 1 - eps_clip_low.", ge=0)
    eps_clip_high: float = key(0.2, "The ratio is clipped above at 1 + eps_clip_high.", ge=0)
    clip_ratio_c: float = key(3.0, "Second clip of dual_clip, for negative advantages.", gt=1)
    max_seq_len: int | None = key(None, "Divisor of loss_reduction=seq_mean_token_sum_norm.", gt=0)
    off_policy_correction: OffPolicyCorrectionConfig = section(OffPolicyCorrectionConfig)
    sapo: SapoConfig = section(SapoConfig)
    cispo: CispoConfig = section(CispoConfig)
    clip_cov: ClipCovConfig = section(ClipCovConfig)
    kl_cov: KlCovConfig = section(KlCovConfig)
    dppo: DppoConfig = section(DppoConfig)

    @property
    def needs_reference(self) -> bool:
        """Whether the reference model scores each batch."""
        return self.use_kl_loss or self.use_kl_in_reward
