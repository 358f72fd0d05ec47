"""Which weight version produced each token of a sample; pure arithmetic over cuts, no clocks and no engine."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from skyrl_rollout.tokens import VersionSpan


class VersionLedger:
    """The versions of one sample: a list of cuts, each taken while the engine is paused for a commit.

    A cut at k says: tokens [0, k) exist, token k and later ones come from the new version. Readers may lag behind the
    engine; a delta that arrives after the cut is still split at k.
    """

    __slots__ = ("_oldest_kv", "_starts", "_versions")

    def __init__(self, version: int, oldest_kv: int | None = None) -> None:
        """version: the committed one at admission. oldest_kv: the oldest version whose KV is read; default version."""
        self._starts = [0]
        self._versions = [version]
        self._oldest_kv = [_checked_kv(version, oldest_kv)]

    @property
    def version(self) -> int:
        """The version of tokens that are not made yet."""
        return self._versions[-1]

    @property
    def oldest_kv(self) -> int:
        """The oldest version whose KV the tokens that are not made yet attend to."""
        return self._oldest_kv[-1]

    def cut(self, num_tokens_made: int, new_version: int, oldest_kv: int | None = None) -> None:
        """Tokens from `num_tokens_made` on come from `new_version`; `oldest_kv`: the oldest KV they read.

        Raises ValueError when a cut lies before the last one or the version does not grow.
        """
        if num_tokens_made < self._starts[-1]:
            raise ValueError(f"a cut at {num_tokens_made} tokens lies before the last cut at {self._starts[-1]}")
        if new_version <= self._versions[-1]:
            raise ValueError(f"version {new_version} does not follow version {self._versions[-1]}: versions only grow")
        kv = _checked_kv(new_version, oldest_kv)
        if num_tokens_made == self._starts[-1]:  # the last version made no token
            self._versions[-1], self._oldest_kv[-1] = new_version, kv
            return
        self._starts.append(num_tokens_made)
        self._versions.append(new_version)
        self._oldest_kv.append(kv)

    def version_at(self, offset: int) -> int:
        """The version that produces token `offset`."""
        if offset < 0:
            raise ValueError(f"token offset {offset} is negative")
        return self._versions[bisect_right(self._starts, offset) - 1]

    def split(self, offset: int, count: int) -> list[tuple[int, int, int, int]]:
        """Cuts tokens [offset, offset + count) into (offset, count, version, oldest_kv) pieces of one version each."""
        if offset < 0 or count < 0:
            raise ValueError(f"tokens [{offset}, {offset + count}) are not a range of offsets")
        pieces, end = [], offset + count
        i = bisect_right(self._starts, offset) - 1
        while offset < end:
            stop = end if i + 1 == len(self._starts) else min(end, self._starts[i + 1])
            pieces.append((offset, stop - offset, self._versions[i], self._oldest_kv[i]))
            offset, i = stop, i + 1
        return pieces

    def spans(self, total: int) -> tuple[VersionSpan, ...]:
        """The spans of a sample of `total` tokens: dense, in order, none empty."""
        return tuple(VersionSpan(*piece) for piece in self.split(0, total))


def _checked_kv(version: int, oldest_kv: int | None) -> int:
    kv = version if oldest_kv is None else oldest_kv
    if kv > version:
        raise ValueError(f"the oldest KV version {kv} is newer than the weight version {version}")
    return kv


def versions_per_token(spans: Sequence[VersionSpan], total: int) -> np.ndarray:
    """int64 [total]: the version of every token, from the spans that a server reports.

    Raises ValueError when the spans leave a token without a version, overlap, or describe tokens that do not exist.
    """
    versions, end = np.empty(total, np.int64), 0
    for span in spans:
        if span.start != end or span.length <= 0:
            raise ValueError(f"span [{span.start}, {span.start + span.length}) does not follow token {end}")
        end += span.length
        versions[span.start : end] = span.weight_version
    if end != total:
        raise ValueError(f"the spans cover {end} of {total} tokens: the version of the others is unknown")
    return versions
