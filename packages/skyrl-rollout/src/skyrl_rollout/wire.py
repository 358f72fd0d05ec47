"""Dataclasses to protobuf and back: the values and arrays that both ends of the seam read the same way."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import google_crc32c
import numpy as np

from skyrl_rollout.tokens import LogprobMode, Sampling, TopK, VersionSpan
from skyrl_rollout.v1 import control_pb2, generation_pb2, tensor_pb2, weights_pb2
from skyrl_rollout.weights.manifest import ITEM_BYTES, Lora, Manifest, TensorLayout, TensorSpec

TOKEN_DTYPE = np.dtype("<i4")
LOGPROB_DTYPE = np.dtype("<f4")
Checked = generation_pb2.Started | generation_pb2.TokenDelta | generation_pb2.ScoreResponse
"""Messages that carry a checksum of their arrays."""
INDEX_ENCODING = "i32"  # of an overwrite delta
MOST_DIMENSIONS = 32  # of any tensor; to multiply a million of them would take hours

SCALAR_TYPES: dict[str, tensor_pb2.ScalarType] = {
    name: tensor_pb2.ScalarType.Value(f"SCALAR_TYPE_{name.upper()}") for name in ITEM_BYTES
}
DTYPE_NAMES = {number: name for name, number in SCALAR_TYPES.items()}

_ARRAY_DTYPES = {
    "float32": "f32", "float16": "f16", "int64": "i64", "int32": "i32", "int16": "i16", "int8": "i8", "uint8": "u8",
}  # fmt: skip

PAUSE_MODES: dict[str, control_pb2.PauseMode] = {
    "abort": control_pb2.PAUSE_MODE_ABORT,
    "wait": control_pb2.PAUSE_MODE_WAIT,
    "keep": control_pb2.PAUSE_MODE_KEEP,
}
ADMISSIONS: dict[str, control_pb2.Admission] = {
    "queue": control_pb2.ADMISSION_QUEUE,
    "reject": control_pb2.ADMISSION_REJECT,
}
KV_POLICIES: dict[str, control_pb2.KvPolicy] = {
    "recompute": control_pb2.KV_POLICY_RECOMPUTE,
    "retain": control_pb2.KV_POLICY_RETAIN,
}

EXTRAS: dict[str, generation_pb2.Extra] = {
    "routed_experts": generation_pb2.EXTRA_ROUTED_EXPERTS,
    "top_p_token_ids": generation_pb2.EXTRA_TOP_P_TOKEN_IDS,
}

LOGPROB_MODES: dict[LogprobMode, generation_pb2.LogprobMode] = {
    LogprobMode.RAW: generation_pb2.LOGPROB_MODE_RAW,
    LogprobMode.TEMPERATURE: generation_pb2.LOGPROB_MODE_TEMPERATURE,
    LogprobMode.SAMPLING: generation_pb2.LOGPROB_MODE_SAMPLING,
}

_SCALARS = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "min_tokens", "ignore_eos", "seed",
    "frequency_penalty", "presence_penalty", "repetition_penalty",
)  # fmt: skip


def token_bytes(ids: Sequence[int] | np.ndarray) -> bytes:
    """int [n] -> little-endian int32 bytes. Raises ValueError for another shape or an id outside [0, 2**31)."""
    ids = np.asarray(ids)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"token ids are a flat list of integers, got shape {list(ids.shape)} of {ids.dtype}")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) > 0x7FFFFFFF):
        raise ValueError(f"token ids lie in [0, 2**31), got {int(ids.min())} to {int(ids.max())}")
    return ids.astype(TOKEN_DTYPE, copy=False).tobytes()


def sampling_to_pb(s: Sampling) -> generation_pb2.SamplingParams:
    """Every value is sent, defaults included, so that both ends cannot differ about one."""
    pb = generation_pb2.SamplingParams(
        stop_token_ids=s.stop_token_ids, stop_strings=s.stop_strings, logit_bias=s.logit_bias
    )
    for name in _SCALARS:
        value = getattr(s, name)
        if value is not None:
            setattr(pb, name, value)
    return pb


def sampling_from_pb(pb: generation_pb2.SamplingParams) -> Sampling:
    """An unset field takes the default that the protocol names."""
    given = {name: getattr(pb, name) for name in _SCALARS if pb.HasField(name)}
    return Sampling(
        stop_token_ids=tuple(pb.stop_token_ids),
        stop_strings=tuple(pb.stop_strings),
        logit_bias=dict(pb.logit_bias),
        **given,
    )


def tensor_to_pb(array: np.ndarray) -> tensor_pb2.Tensor:
    """Row-major, little-endian. Raises ValueError for a dtype that does not travel."""
    name = _ARRAY_DTYPES.get(array.dtype.name)
    if name is None:
        raise ValueError(f"an array of {array.dtype} does not travel, one of {sorted(_ARRAY_DTYPES)} does")
    data = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
    return tensor_pb2.Tensor(dtype=SCALAR_TYPES[name], shape=array.shape, data=data)


def tensor_from_pb(pb: tensor_pb2.Tensor) -> np.ndarray:
    """Read-only. Raises ValueError for a dtype that is not known here, for more dimensions than a tensor has, and for
    bytes that do not fill the shape."""
    name = next((n for n, dtype in _ARRAY_DTYPES.items() if SCALAR_TYPES[dtype] == pb.dtype), None)
    if name is None:
        raise ValueError(f"scalar type {pb.dtype} is not known here")
    _check_dimensions(pb.shape, "an array")
    dtype, shape = np.dtype(name).newbyteorder("<"), tuple(pb.shape)
    if len(pb.data) != dtype.itemsize * math.prod(shape):
        raise ValueError(f"{len(pb.data)} bytes are not a {list(shape)} of {name}")
    return np.frombuffer(pb.data, dtype).reshape(shape)


def _check_dimensions(shape: Sequence[int], what: str) -> None:
    if len(shape) > MOST_DIMENSIONS:
        raise ValueError(f"{what} has {len(shape)} dimensions, at most {MOST_DIMENSIONS} are taken")


def top_to_pb(top: TopK) -> generation_pb2.TopLogprobs:
    """The inverse of `top_from_pb`."""
    return generation_pb2.TopLogprobs(
        k=top.token_ids.shape[1],
        token_ids=np.ascontiguousarray(top.token_ids, TOKEN_DTYPE).tobytes(),
        logprobs=np.ascontiguousarray(top.logprobs, LOGPROB_DTYPE).tobytes(),
    )


def top_from_pb(pb: generation_pb2.TopLogprobs, count: int) -> TopK:
    """For `count` tokens. Raises ValueError for another number of bytes than that takes."""
    if not len(pb.token_ids) == len(pb.logprobs) == 4 * pb.k * count:
        raise ValueError(f"{len(pb.token_ids)} and {len(pb.logprobs)} bytes are not the top {pb.k} of {count} tokens")
    shape = (count, pb.k)
    return TopK(
        np.frombuffer(pb.token_ids, TOKEN_DTYPE).reshape(shape),
        np.frombuffer(pb.logprobs, LOGPROB_DTYPE).reshape(shape),
    )


def crc32c_of(pb: Checked) -> int:
    """What `crc32c` of a message with these arrays has to be: see generation.proto."""
    crc = 0
    for part in _arrays(pb):
        crc = google_crc32c.extend(crc, part)
    return crc


def is_as_sent(pb: Checked) -> bool:
    """Whether the arrays have the checksum that came with them; true where none came."""
    return not pb.HasField("crc32c") or pb.crc32c == crc32c_of(pb)


def _arrays(pb: Checked) -> Iterable[bytes]:
    if isinstance(pb, generation_pb2.Started):
        yield pb.prompt_logprobs
        return
    if isinstance(pb, generation_pb2.TokenDelta):
        yield pb.token_ids
    yield pb.logprobs
    if pb.HasField("top"):
        yield from (pb.top.token_ids, pb.top.logprobs)
    if isinstance(pb, generation_pb2.TokenDelta):
        yield from (pb.extras[name].data for name in sorted(pb.extras))


def spans_from_pb(spans: Iterable[generation_pb2.VersionSpan]) -> tuple[VersionSpan, ...]:
    """The spans in the order of the message, unchecked."""
    return tuple(VersionSpan(s.start, s.length, s.weight_version, s.oldest_kv_version) for s in spans)


def layout_to_pb(layout: TensorLayout) -> control_pb2.TensorLayout:
    """The inverse of `layout_from_pb`."""
    return control_pb2.TensorLayout(name=layout.name, dtype=SCALAR_TYPES[layout.dtype], shape=layout.shape)


def layout_from_pb(pb: control_pb2.TensorLayout | weights_pb2.TensorSpec) -> TensorLayout:
    """Raises ValueError for a dtype that this side does not know, and for more dimensions than a tensor has."""
    if pb.dtype not in DTYPE_NAMES:
        raise ValueError(f"tensor {pb.name}: scalar type {pb.dtype} is not known here")
    _check_dimensions(pb.shape, f"tensor {pb.name}")
    return TensorLayout(pb.name, DTYPE_NAMES[pb.dtype], tuple(pb.shape))


def manifest_to_pb(manifest: Manifest) -> weights_pb2.WeightManifest:
    """The manifest with its digest."""
    pb = weights_pb2.WeightManifest(
        policy_id=manifest.policy_id,
        target_version=manifest.target_version,
        base_version=manifest.base_version,
        digest=manifest.digest,
        tensors=[
            weights_pb2.TensorSpec(
                name=t.layout.name,
                dtype=SCALAR_TYPES[t.layout.dtype],
                shape=t.layout.shape,
                shard=t.shard,
                offset=t.offset,
                nbytes=t.nbytes,
                content_digest=t.content_digest,
            )
            for t in manifest.tensors
        ],
    )
    if manifest.lora is not None:
        lora = manifest.lora
        pb.lora.base_fingerprint, pb.lora.rank, pb.lora.alpha = lora.base_fingerprint, lora.rank, lora.alpha
        pb.lora.target_modules.extend(lora.target_modules)
    elif manifest.base_version is not None:
        pb.overwrite.index_encoding = INDEX_ENCODING
    else:
        pb.full.naming = "hf"
    return pb


def manifest_from_pb(pb: weights_pb2.WeightManifest) -> Manifest:
    """Raises ValueError when a tensor's `nbytes` is not what its dtype and shape say (a delta's are its own), or its
    dtype is unknown."""
    specs, is_delta = [], pb.WhichOneof("kind") == "overwrite"
    for t in pb.tensors:
        layout = layout_from_pb(t)
        if layout.nbytes != t.nbytes and not is_delta:
            raise ValueError(
                f"tensor {t.name}: {list(t.shape)} of {layout.dtype} are {layout.nbytes} bytes, not {t.nbytes}"
            )
        specs.append(TensorSpec(layout, t.shard, t.offset, t.content_digest, t.nbytes if is_delta else None))
    lora = None
    if pb.WhichOneof("kind") == "lora":
        lora = Lora(pb.lora.base_fingerprint, pb.lora.rank, pb.lora.alpha, tuple(pb.lora.target_modules))
    base_version = pb.base_version if pb.HasField("base_version") else None
    return Manifest(pb.target_version, tuple(specs), pb.policy_id, base_version, lora)
