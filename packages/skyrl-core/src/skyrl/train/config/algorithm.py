"""How rewards become gradients (`trainer.algorithm.*`)."""

from __future__ import annotations

from typing import Literal

from skyrl.train.config.part import ConfigPart, key


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
    kl_loss_coef: float = key(1e-3, "Coefficient of the KL term.", ge=0)
    kl_estimator_type: str = key("k3", "KL estimator.")

    use_entropy_loss: bool = key(False, "Add an entropy bonus.")
    entropy_loss_coef: float = key(0.01, "Coefficient of the entropy bonus.", ge=0)

    grpo_norm_by_std: bool = key(True, "Divide a group's advantages by the standard deviation of its rewards.")
    advantage_batch_normalize: bool = key(False, "Whiten advantages over the batch.")

    eps_clip_low: float = key(0.2, "The ratio is clipped below at 1 - eps_clip_low.", ge=0)
    eps_clip_high: float = key(0.2, "The ratio is clipped above at 1 + eps_clip_high.", ge=0)
    clip_ratio_c: float = key(3.0, "Second clip of dual_clip, for negative advantages.", gt=1)
    max_seq_len: int | None = key(None, "Divisor of loss_reduction=seq_mean_token_sum_norm.", gt=0)
