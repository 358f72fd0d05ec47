"""How probable given tokens are, each after all before it, and what would have been more probable there."""

from __future__ import annotations

import asyncio

import numpy as np

from skyrl_rollout.reference.logits import CONTEXT, NO_TOKEN, LogitTable
from skyrl_rollout.reference.sampling import largest, log_softmax
from skyrl_rollout.server.engine import TopK

BLOCK_ELEMENTS = 1 << 20  # logits computed before other tasks get their turn


async def forced_logprobs(
    table: LogitTable, bias_V: np.ndarray | None, tokens: np.ndarray, start: int, *, scale: float, top: int
) -> tuple[np.ndarray, TopK | None]:
    """log_softmax(logits / scale) of tokens[start:], float32 [S], and the `top` most probable tokens at each.

    bias_V: what an adapter adds to the logits. start: at least 1, less than the number of tokens.
    """
    whole = np.concatenate([np.full(CONTEXT, NO_TOKEN, np.int64), tokens.astype(np.int64)])
    last_S4 = np.lib.stride_tricks.sliding_window_view(whole, CONTEXT)[start : len(tokens)]
    block, parts = max(1, BLOCK_ELEMENTS // table.vocab_size), []
    for at in range(0, len(last_S4), block):
        logits_BV = table.logits(last_S4[at : at + block])
        if bias_V is not None:
            logits_BV += bias_V
        parts.append(_chosen(log_softmax(logits_BV / scale), tokens[start + at :], top))
        await asyncio.sleep(0)
    logprobs_S, ids_Sk, top_Sk = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return logprobs_S, TopK(ids_Sk, top_Sk) if top else None


def _chosen(logprobs_BV: np.ndarray, tokens: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(logprob float32 [B] of each token, ids int32 [B, top] and logprobs float32 [B, top] of the most probable)."""
    rows_B = np.arange(len(logprobs_BV))
    of_tokens_B = logprobs_BV[rows_B, tokens[: len(rows_B)]].astype(np.float32)
    ids_Bk = np.array([largest(row, top) if top else [] for row in logprobs_BV], np.int32).reshape(len(rows_B), top)
    return of_tokens_B, ids_Bk, np.take_along_axis(logprobs_BV, ids_Bk, axis=1).astype(np.float32)
