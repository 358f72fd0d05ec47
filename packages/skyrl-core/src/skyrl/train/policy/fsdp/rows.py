"""How flat sequences become rows of a model: padded on the right, where causal attention never looks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from skyrl.train.policy.batch import TrajectoryBatch


@dataclass(frozen=True)
class Rows:
    """input_ids_BL; predictors_T, the flat position (row * L + column) whose logits predict each response token;
    labels_T, those tokens."""

    input_ids_BL: torch.Tensor
    predictors_T: torch.Tensor
    labels_T: torch.Tensor


def to_rows(micro: TrajectoryBatch) -> Rows:
    """Needs no attention mask: real tokens attend only to earlier ones, padding comes after them. ValueError for an
    empty prompt, whose first response token nothing predicts."""
    if int(micro.prompt_lens_S.min()) < 1:
        raise ValueError("a sequence has an empty prompt: its first response token has no position that predicts it")
    lens_S, device = micro.seq_lens_S, micro.token_ids_N.device
    width = int(lens_S.max())
    rows_N = torch.repeat_interleave(torch.arange(micro.num_sequences, device=device), lens_S)
    starts_S = torch.cumsum(lens_S, 0) - lens_S
    columns_N = torch.arange(micro.token_ids_N.numel(), device=device) - starts_S[rows_N]
    input_ids_BL = torch.zeros(micro.num_sequences, width, dtype=torch.int64, device=device)
    input_ids_BL[rows_N, columns_N] = micro.token_ids_N
    segments_T = micro.segment_ids_T
    columns_T = micro.prompt_lens_S[segments_T] + micro.positions_T
    labels_T = micro.token_ids_N[starts_S[segments_T] + columns_T]
    return Rows(input_ids_BL, segments_T * width + columns_T - 1, labels_T)


class HeadSelection:
    """Makes the LM head see only chosen positions, so that logits exist for response tokens alone.

    `logits_to_keep` of transformers takes the same columns of every row; responses start at different columns. The
    model stays unmodified otherwise, so whatever it does to its logits (caps, scales) still happens.
    """

    def __init__(self, head: nn.Module) -> None:
        self._positions_T: torch.Tensor | None = None
        head.register_forward_pre_hook(self._select)

    def logits(self, model: nn.Module, rows: Rows) -> torch.Tensor:
        """[T, V] for the predictors, in order."""
        self._positions_T = rows.predictors_T
        try:
            return model(input_ids=rows.input_ids_BL, use_cache=False).logits.squeeze(0)
        finally:
            self._positions_T = None

    def _select(self, _head: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        if self._positions_T is None:
            return None
        return (inputs[0].flatten(0, 1)[self._positions_T][None], *inputs[1:])


def token_values(values_T1: torch.Tensor) -> torch.Tensor:
    """[T]: a value head's numbers, in float32 (float64 for a float64 model)."""
    values_T = values_T1.squeeze(-1)
    return values_T if values_T.dtype == torch.float64 else values_T.float()
