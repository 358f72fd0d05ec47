"""Which tensors an update carries, where their bytes lie, and the digests that prove them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import xxhash

ITEM_BYTES = {
    "f32": 4, "f16": 2, "bf16": 2, "f8_e4m3": 1, "f8_e5m2": 1, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u8": 1,
}  # fmt: skip

ALIGNMENT_BYTES = 64  # a mapped segment can be viewed as any dtype without a copy


@dataclass(frozen=True)
class TensorLayout:
    """Name, dtype ("f32", "bf16", ...) and shape, as in the Hugging Face checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        n = ITEM_BYTES[self.dtype]
        for d in self.shape:
            n *= d
        return n


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's layout, its place in a shard and the xxh3-128 of its (whole, final) bytes.

    sent_nbytes: the bytes that travel, where they are not the whole tensor (a delta).
    """

    layout: TensorLayout
    shard: int
    offset: int
    content_digest: bytes = b""
    sent_nbytes: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the shard."""
        return self.layout.nbytes if self.sent_nbytes is None else self.sent_nbytes


@dataclass(frozen=True)
class Lora:
    """What a manifest says of a low-rank adapter beside its tensors: weights are W + (alpha / rank) * B @ A.

    base_fingerprint: `fingerprint` of the base model's tensors. target_modules: the ends of their names ("q_proj").
    """

    base_fingerprint: str
    rank: int
    alpha: float
    target_modules: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """One update: `target_version` and its tensors in canonical order.

    Neither base_version nor lora: every tensor of the model. base_version: a delta, changed elements of some tensors
    over that version. lora: an adapter, loaded as `policy_id`.
    """

    target_version: int
    tensors: tuple[TensorSpec, ...]
    policy_id: str = ""
    base_version: int | None = None
    lora: Lora | None = None

    @property
    def kind(self) -> str:
        """ "full", "overwrite" or "lora"."""
        if self.lora is not None:
            return "lora"
        return "full" if self.base_version is None else "overwrite"

    @property
    def digest(self) -> bytes:
        """xxh3-128 over every (name, dtype, shape, content digest), in order."""
        h = xxhash.xxh3_128()
        for t in self.tensors:
            h.update(f"{t.layout.name}\0{t.layout.dtype}\0{','.join(map(str, t.layout.shape))}\0".encode())
            h.update(t.content_digest)
        return h.digest()

    def shard_nbytes(self) -> dict[int, int]:
        """shard -> bytes, the last tensor's end."""
        ends: dict[int, int] = {}
        for t in self.tensors:
            ends[t.shard] = max(ends.get(t.shard, 0), t.offset + t.nbytes)
        return ends


def content_digest(data: bytes | memoryview) -> bytes:
    """xxh3-128 over the bytes sent."""
    return xxhash.xxh3_128_digest(data)


def layout_digest(tensors: Iterable[TensorLayout]) -> bytes:
    """xxh3-128 over every (name, shape) in canonical (sorted by name) order; the dtype is the server's own."""
    h = xxhash.xxh3_128()
    for t in sorted(tensors, key=lambda t: t.name):
        h.update(f"{t.name}\0{','.join(map(str, t.shape))}\0".encode())
    return h.digest()


def fingerprint(tensors: Iterable[TensorLayout]) -> str:
    """xxh3-128 (hex) over every (name, dtype, shape) in canonical (sorted by name) order."""
    h = xxhash.xxh3_128()
    for t in sorted(tensors, key=lambda t: t.name):
        h.update(f"{t.name}\0{t.dtype}\0{','.join(map(str, t.shape))}\0".encode())
    return h.hexdigest()


def place(tensors: Sequence[TensorLayout], *, shard: int = 0) -> tuple[TensorSpec, ...]:
    """Lays tensors one after another in one shard, each aligned."""
    specs, offset = [], 0
    for t in tensors:
        specs.append(TensorSpec(t, shard, offset))
        offset += -(-t.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return tuple(specs)


def differences(ours: Iterable[TensorLayout], theirs: Iterable[TensorLayout]) -> list[str]:
    """One sentence per tensor that is missing, extra, or of another shape or dtype; empty when equal."""
    a, b = {t.name: t for t in ours}, {t.name: t for t in theirs}
    out = [f"{n}: the trainer has it {list(a[n].shape)}, the server has no such tensor" for n in a if n not in b]
    out += [f"{n}: the server needs it {list(b[n].shape)}, the trainer does not send it" for n in b if n not in a]
    for n in a:
        if n in b and a[n].shape != b[n].shape:
            out.append(f"{n}: shape {list(a[n].shape)} from the trainer, {list(b[n].shape)} at the server")
        elif n in b and a[n].dtype != b[n].dtype:
            out.append(f"{n}: dtype {a[n].dtype} from the trainer, {b[n].dtype} at the server")
    return out
