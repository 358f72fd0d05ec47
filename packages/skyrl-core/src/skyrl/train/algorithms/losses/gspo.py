"""Group sequence policy optimisation: one ratio for a whole sequence."""

from __future__ import annotations

from typing import Any

from skyrl.train.algorithms.losses.inputs import LossInputs, TokenLoss, clipped_surrogate, log_ratio_to
from skyrl.train.algorithms.segments import segment_sum

LOG_RATIO_CEILING = 10.0


def gspo(inputs: LossInputs, algorithm: Any) -> TokenLoss:
    """GSPO-token (arXiv 2507.18071, eq. 14 and 15), meant for `loss_reduction=sequence_mean`:

        -min(s A, clip(s, 1 - eps_clip_low, 1 + eps_clip_high) A),   s = sg[s_i] exp(logp - sg[logp]),
        s_i = exp(mean over the trained tokens of sequence i of (logp - old_logp))

    sg stops the gradient; the exponent is at most 10.
    """
    delta_T = log_ratio_to(inputs, inputs.old_logprobs_T)
    num_sequences = int(inputs.segment_ids_T.max()) + 1 if inputs.segment_ids_T.numel() else 0
    sums_S = segment_sum(delta_T.detach(), inputs.segment_ids_T, num_sequences)
    counts_S = segment_sum((inputs.loss_mask_T > 0).to(delta_T.dtype), inputs.segment_ids_T, num_sequences)
    mean_T = (sums_S / counts_S.clamp(min=1))[inputs.segment_ids_T]
    ratio_T = (mean_T + (delta_T - delta_T.detach())).clamp(max=LOG_RATIO_CEILING).exp()
    return clipped_surrogate(ratio_T, inputs.advantages_T, algorithm)
