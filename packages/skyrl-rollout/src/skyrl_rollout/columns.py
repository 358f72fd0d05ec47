"""What travels beside the tokens of a sample: arrays with one row per token, joined and cut like the tokens; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from skyrl_rollout.tokens import TopK

PAD = -1  # fills rows of token ids that are shorter than the longest of their array


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """One array of its own from arrays [n, ...]; where their second axes differ, short rows are filled with PAD.

    Raises ValueError for arrays that differ otherwise.
    """
    widths = {part.shape[1] for part in parts if part.ndim == 2}
    if len(widths) > 1:
        most = max(widths)
        parts = [np.pad(p, ((0, 0), (0, most - p.shape[1])), constant_values=PAD) for p in parts]
    return np.concatenate(parts)


def joined_top(parts: Sequence[TopK | None]) -> TopK | None:
    """The top logprobs of a whole sample, None where there are none. Raises ValueError where only some parts have
    them, or another number of them."""
    there = [part for part in parts if part is not None]
    if not there:
        return None
    if len(there) != len(parts) or len({part.token_ids.shape[1] for part in there}) > 1:
        raise ValueError("the number of top logprobs changes within one sample")
    return TopK(np.concatenate([p.token_ids for p in there]), np.concatenate([p.logprobs for p in there]))


def joined_extras(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The extra outputs of a whole sample by name. Raises ValueError where only some parts have one."""
    names = {name for part in parts for name in part}
    if any(part.keys() != names for part in parts):
        raise ValueError(f"an extra output is missing in a part of a sample: all have {sorted(names)} or none")
    return {name: joined([part[name] for part in parts]) for name in sorted(names)}


class Columns:
    """The rows that wait beside the tokens of one sample. `row_nbytes` bounds the bytes of each."""

    __slots__ = ("_extras", "_tops", "row_nbytes")

    def __init__(self) -> None:
        self._tops: list[TopK | None] = []
        self._extras: list[Mapping[str, np.ndarray]] = []
        self.row_nbytes = 0

    def add(self, top: TopK | None, extras: Mapping[str, np.ndarray], count: int, keep: int) -> None:
        """Takes the first `keep` of `count` rows. Raises ValueError for an array with another number of rows."""
        arrays = dict(extras) if top is None else {**extras, "top ids": top.token_ids, "top logprobs": top.logprobs}
        wrong = [name for name, array in arrays.items() if len(array) != count]
        if wrong:
            raise ValueError(f"the engine gave {count} tokens with {len(arrays[wrong[0]])} rows of {wrong[0]}")
        self.row_nbytes = max(self.row_nbytes, sum(a.itemsize * int(np.prod(a.shape[1:])) for a in arrays.values()))
        if keep:
            self._tops.append(top if top is None or keep == count else TopK(top.token_ids[:keep], top.logprobs[:keep]))
            self._extras.append({name: array[:keep] for name, array in extras.items()})

    def take(self) -> tuple[TopK | None, dict[str, np.ndarray]]:
        """All rows that wait, joined."""
        top, extras = joined_top(self._tops), joined_extras(self._extras)
        self._tops, self._extras = [], []
        return top, extras


def cut_rows(
    top: TopK | None, extras: Mapping[str, np.ndarray], start: int, stop: int
) -> tuple[TopK | None, dict[str, np.ndarray]]:
    """Rows [start, stop) of both."""
    return (
        None if top is None else TopK(top.token_ids[start:stop], top.logprobs[start:stop]),
        {name: array[start:stop] for name, array in extras.items()},
    )
