"""Which model the reference server stands in for: a folder's config and layout, or a small built-in one."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from skyrl_rollout.server.engine import ModelIdentity
from skyrl_rollout.weights.manifest import TensorLayout

DTYPES = {
    "F32": "f32", "F16": "f16", "BF16": "bf16", "F8_E4M3": "f8_e4m3", "F8_E5M2": "f8_e5m2",
    "I64": "i64", "I32": "i32", "I16": "i16", "I8": "i8", "U8": "u8",
}  # fmt: skip
MAX_HEADER_BYTES = 100 << 20
BUILT_IN_WIDTH = 16


def built_in(*, vocab_size: int, max_context: int) -> ModelIdentity:
    """A float32 layout of three tensors; token 0 ends a sample."""
    tensors = (
        TensorLayout("canary.weight", "f32", (vocab_size,)),
        TensorLayout("model.embed_tokens.weight", "f32", (vocab_size, BUILT_IN_WIDTH)),
        TensorLayout("model.norm.weight", "f32", (BUILT_IN_WIDTH,)),
    )
    return ModelIdentity("reference", vocab_size, max_context, (0,), "f32", tensors)


class ModelFolder:
    """A Hugging Face model folder, read without loading it: its JSON files and its safetensors headers."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError, naming the file, where the folder is not such a model."""
        self.path = path
        self._places: dict[str, tuple[Path, int, int]] = {}
        if not path.is_dir():
            raise ValueError(f"--model {path} is not a folder: give a Hugging Face model folder")
        config = self._json("config.json")
        tensors = self._layouts()
        if config.get("tie_word_embeddings") and "model.embed_tokens.weight" in {t.name for t in tensors}:
            tensors = [t for t in tensors if t.name != "lm_head.weight"]
        self.identity = ModelIdentity(
            name=path.resolve().name,
            vocab_size=self._number(config, "vocab_size"),
            max_context=self._number(config, "max_position_embeddings"),
            eos_token_ids=self._eos(config),
            dtype=Counter({d: sum(t.nbytes for t in tensors if t.dtype == d) for d in DTYPES.values()}).most_common(1)[
                0
            ][0],
            tensors=tuple(sorted(tensors, key=lambda t: t.name)),
            tokenizer_digest=_file_digest(path / "tokenizer.json"),
        )

    def read(self, name: str) -> memoryview:
        """The stored bytes of one tensor."""
        path, offset, nbytes = self._places[name]
        with path.open("rb") as file:
            file.seek(offset)
            return memoryview(file.read(nbytes))

    def _layouts(self) -> list[TensorLayout]:
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise ValueError(f"{self.path} holds no *.safetensors file: save the model with safe serialization")
        layouts = []
        for file in files:
            header, start = read_header(file)
            for name, entry in header.items():
                if entry["dtype"] not in DTYPES:
                    raise ValueError(f"{file}: tensor {name} has dtype {entry['dtype']}, known are {sorted(DTYPES)}")
                layouts.append(TensorLayout(name, DTYPES[entry["dtype"]], tuple(entry["shape"])))
                begin, end = entry["data_offsets"]
                self._places[name] = (file, start + begin, end - begin)
        return layouts

    def _eos(self, config: dict[str, Any]) -> tuple[int, ...]:
        generation = self._json("generation_config.json") if (self.path / "generation_config.json").exists() else {}
        eos = generation.get("eos_token_id", config.get("eos_token_id"))
        return tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),)

    def _json(self, name: str) -> dict[str, Any]:
        try:
            return dict(json.loads((self.path / name).read_text()))
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.path / name} cannot be read: {error}") from None

    def _number(self, config: dict[str, Any], key: str) -> int:
        value = config.get(key)
        if not isinstance(value, int):
            raise ValueError(f"{self.path / 'config.json'} has no number {key!r}")
        return value


def read_header(file: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """(tensor name -> {dtype, shape, data_offsets}, offset of the first byte of data) of a safetensors file.

    The format: 8 bytes little-endian length, that many bytes of JSON, data. Raises ValueError naming the file.
    """
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= MAX_HEADER_BYTES:
                raise ValueError(f"its header claims {length} bytes")
            header = json.loads(stream.read(length))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is not a safetensors file: {error}") from None
    header.pop("__metadata__", None)
    return header, 8 + length


def to_float64(data: memoryview | bytes, dtype: str, first: int | None = None) -> np.ndarray:
    """The values of a flat tensor, or only the first ones, as float64 [n]; the f8 types by their byte value."""
    if dtype == "bf16":
        return (np.frombuffer(data, "<u2")[:first].astype("<u4") << 16).view("<f4").astype(np.float64)
    kinds = {"f32": "<f4", "f16": "<f2", "i64": "<i8", "i32": "<i4", "i16": "<i2", "i8": "i1"}
    return np.frombuffer(data, kinds.get(dtype, "u1"))[:first].astype(np.float64)


def _file_digest(path: Path) -> str:
    return xxhash.xxh3_128_hexdigest(path.read_bytes()) if path.exists() else ""
