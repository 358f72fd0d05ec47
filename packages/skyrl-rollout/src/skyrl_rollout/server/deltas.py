"""Changed elements over the committed weights: what a delta must be, and the copy that it is applied to."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from skyrl_rollout.errors import WrongState
from skyrl_rollout.server.staging import OwnStaging, Staging, refuse_corrupt
from skyrl_rollout.weights.manifest import ITEM_BYTES, Manifest, TensorLayout, TensorSpec, content_digest

INDEX_DTYPE = np.dtype("<i4")


class HostCopy:
    """The committed bytes of every tensor in memory of the server's own, from the first full commit on.

    It takes over the memory in which a full update was staged, so that a commit copies nothing.
    """

    def __init__(self) -> None:
        self._staging: OwnStaging | None = None
        self._specs: dict[str, TensorSpec] = {}

    def need(self) -> None:
        """Raises WrongState where there is nothing that a delta could change."""
        if self._staging is None:
            raise WrongState("this server keeps no published weights that a delta could change: publish in full first")

    def adopt(self, staging: OwnStaging, manifest: Manifest) -> None:
        """Keeps the bytes of a full update in place of the last ones; `staging` is closed with the copy."""
        self.drop()
        self._staging, self._specs = staging, {t.layout.name: t for t in manifest.tensors}

    def drop(self) -> None:
        """Forgets everything: the served weights are no longer these bytes."""
        if self._staging is not None:
            self._staging.close()
        self._staging, self._specs = None, {}

    def tensors(self) -> Iterator[tuple[TensorLayout, memoryview]]:
        """Layout and bytes of every tensor, in the order in which they were published."""
        for spec in self._specs.values():
            yield spec.layout, self._view(spec.layout.name)

    def verify(self, staging: Staging, manifest: Manifest) -> None:
        """Raises ValueError for a delta that is not encoded as promised, CorruptBytes naming the tensors that it
        does not turn into those of the manifest. Changes nothing. Slow: run it in a thread."""
        wrong = []
        for spec in manifest.tensors:
            whole = bytearray(self._view(spec.layout.name))
            apply_delta(spec.layout, staging.view(spec), memoryview(whole))
            if content_digest(memoryview(whole)) != spec.content_digest:
                wrong.append(spec)
        refuse_corrupt(wrong)

    def apply(self, staging: Staging, manifest: Manifest) -> None:
        """Changes the copy in place, after `verify`."""
        for spec in manifest.tensors:
            apply_delta(spec.layout, staging.view(spec), self._view(spec.layout.name))

    def _view(self, name: str) -> memoryview:
        self.need()
        assert self._staging is not None
        return self._staging.view(self._specs[name])


def scratch_nbytes(manifest: Manifest) -> int:
    """What `HostCopy.verify` needs beside the staged bytes."""
    return max((t.layout.nbytes for t in manifest.tensors), default=0)


def num_changed(layout: TensorLayout, sent_nbytes: int) -> int:
    """How many elements so many bytes of delta change. Raises ValueError for a length that no delta has."""
    item = ITEM_BYTES[layout.dtype]
    count, rest = divmod(sent_nbytes, INDEX_DTYPE.itemsize + item)
    if rest or count * item > layout.nbytes:
        raise ValueError(
            f"tensor {layout.name}: a delta of {sent_nbytes} bytes is not n int32 indices and n {layout.dtype} values, "
            f"n at most {layout.nbytes // item}"
        )
    return count


def apply_delta(layout: TensorLayout, delta: memoryview, whole: memoryview) -> None:
    """Overwrites the elements of `whole` that `delta` names. Raises ValueError for indices that are not strictly
    ascending inside the tensor, before anything is written."""
    count = num_changed(layout, len(delta))
    if not count:
        return
    kind = np.dtype(f"<u{ITEM_BYTES[layout.dtype]}")
    indices_N = np.frombuffer(delta, INDEX_DTYPE, count)
    values_N = np.frombuffer(delta, kind, count, offset=count * INDEX_DTYPE.itemsize)
    elements = np.frombuffer(whole, kind)
    if indices_N[0] < 0 or indices_N[-1] >= len(elements) or bool((indices_N[1:] <= indices_N[:-1]).any()):
        raise ValueError(
            f"tensor {layout.name}: the indices of its delta must be strictly ascending within [0, {len(elements)})"
        )
    elements[indices_N] = values_N
