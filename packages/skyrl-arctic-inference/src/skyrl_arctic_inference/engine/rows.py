"""Logprobs as arrays, from the flat lists that vLLM hands over; what vLLM did not give is NaN and shifts nothing.

A position holds the given or sampled token first, then the most probable tokens, best first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from skyrl_rollout.server.engine import TopK

if TYPE_CHECKING:
    from vllm.logprobs import FlatLogprobs

Top = tuple[list[int], list[float]]
NAN = float("nan")


def sampled_logprobs(flat: FlatLogprobs | None, count: int, num_top: int) -> tuple[list[float], list[Top]]:
    """The last `count` positions: logprobs of the sampled tokens, and ids and logprobs of the num_top best, if any.

    vLLM hands over the whole history with an empty step and the last `count` positions otherwise.
    """
    if not flat or len(flat) < count:
        return [NAN] * count, [_no_top(num_top)] * count if num_top else []
    spans = list(zip(flat.start_indices[-count:], flat.end_indices[-count:], strict=True))
    logprobs = [flat.logprobs[a] if b > a else NAN for a, b in spans]
    return logprobs, [_top_at(flat, a, b, num_top) for a, b in spans] if num_top else []


def given_rows(flat: FlatLogprobs | None, count: int, num_top: int) -> tuple[np.ndarray, TopK | None]:
    """(logprobs float32 [count], the most probable tokens) of `count` given tokens; vLLM's first row is empty."""
    logprobs, top = sampled_logprobs(flat if flat and len(flat) == count + 1 else None, count, num_top)
    return np.asarray(logprobs, np.float32), top_of(top, num_top) if num_top else None


def prompt_logprobs(flat: FlatLogprobs | None, last_n: int) -> np.ndarray:
    """float32 [last_n]; NaN in front for the prompt's first token, which nothing precedes."""
    count = min(max(len(flat) - 1, 0), last_n) if flat else 0
    logprobs = unknown(last_n)
    if count:
        logprobs[last_n - count :] = given_rows(flat, count, 0)[0]
    return logprobs


def unknown(count: int) -> np.ndarray:
    """float32 [count] of NaN."""
    return np.full(count, NAN, np.float32)


def top_of(rows: Sequence[Top], num_top: int) -> TopK:
    """Rows of (ids, logprobs) as arrays [n, num_top]."""
    ids = np.asarray([ids for ids, _ in rows], np.int32).reshape(-1, num_top)
    return TopK(ids, np.asarray([logprobs for _, logprobs in rows], np.float32).reshape(-1, num_top))


def _top_at(flat: FlatLogprobs, start: int, end: int, num_top: int) -> Top:
    if end - start < num_top + 1:
        return _no_top(num_top)
    return flat.token_ids[start + 1 : start + 1 + num_top], flat.logprobs[start + 1 : start + 1 + num_top]


def _no_top(num_top: int) -> Top:
    return [0] * num_top, [NAN] * num_top
