"""Which model a folder holds: its tensors as the checkpoint names them, vocabulary, end tokens and tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from skyrl_rollout.weights.manifest import TensorLayout

SAFETENSORS_DTYPES = {
    "F32": "f32", "F16": "f16", "BF16": "bf16", "F8_E4M3": "f8_e4m3", "F8_E5M2": "f8_e5m2",
    "I64": "i64", "I32": "i32", "I16": "i16", "I8": "i8", "U8": "u8", "BOOL": "u8",
}  # fmt: skip
FLOATING = ("f32", "f16", "bf16")
HEADER_LIMIT_BYTES = 100_000_000  # the safetensors format's own bound
TIED_HEAD, TIED_EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class ModelFolderError(ValueError):
    """The folder is not a Hugging Face checkpoint that can be served; the message says what is missing."""


@dataclass(frozen=True)
class ModelFolder:
    """What can be read from the files alone, before any engine starts.

    tensors: (name, dtype, shape) sorted by name, tied tensors once, dtypes as stored.
    """

    path: Path
    architectures: tuple[str, ...]
    eos_token_ids: tuple[int, ...]
    tokenizer_digest: str
    tensors: tuple[TensorLayout, ...]

    @property
    def has_tokenizer(self) -> bool:
        return bool(self.tokenizer_digest)

    def linear_names(self) -> list[str]:
        """Last parts of the names of all matrices but the embedding and the head: where an adapter can be."""
        matrices = [t.name.removesuffix(".weight") for t in self.tensors if len(t.shape) == 2]
        embeddings = {name.removesuffix(".weight") for name in (TIED_HEAD, TIED_EMBEDDING)}
        return sorted({name.rpartition(".")[2] for name in matrices if name not in embeddings})

    def layout(self, dtype: str) -> tuple[TensorLayout, ...]:
        """The tensors as an update must carry them: floating point ones in the served `dtype`."""
        return tuple(TensorLayout(t.name, dtype if t.dtype in FLOATING else t.dtype, t.shape) for t in self.tensors)


def read_model_folder(path: Path) -> ModelFolder:
    """Raises ModelFolderError where the folder, its config.json or its *.safetensors are missing or malformed."""
    if not path.is_dir():
        raise ModelFolderError(
            f"--model {path}: there is no such folder; expected a Hugging Face checkpoint "
            f"(config.json and *.safetensors), downloaded beforehand"
        )
    config = _read_json(path / "config.json")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelFolderError(f"--model {path}: no *.safetensors in it; save the checkpoint as safetensors")
    stored: dict[str, TensorLayout] = {}
    for file in files:
        stored.update((t.name, t) for t in read_header(file))
    generation = path / "generation_config.json"
    sources = [config, config.get("text_config") or {}, _read_json(generation) if generation.is_file() else {}]
    return ModelFolder(
        path=path,
        architectures=tuple(config.get("architectures") or ()),
        eos_token_ids=end_tokens(sources),
        tokenizer_digest=_tokenizer_digest(path / "tokenizer.json"),
        tensors=canonical(stored.values(), tied=_is_tied(config)),
    )


def read_header(file: Path) -> list[TensorLayout]:
    """Every tensor of one safetensors file, from its header alone. Raises ModelFolderError for anything else."""
    try:
        with file.open("rb") as f:
            size = int.from_bytes(f.read(8), "little")
            if not 2 <= size <= min(HEADER_LIMIT_BYTES, file.stat().st_size):
                raise ValueError(f"a header of {size} bytes")
            header = json.loads(f.read(size))
        return [
            TensorLayout(name, SAFETENSORS_DTYPES[entry["dtype"]], tuple(entry["shape"]))
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFolderError(f"{file} is not a safetensors file that can be served: {error}") from None


def canonical(tensors: Iterable[TensorLayout], *, tied: bool) -> tuple[TensorLayout, ...]:
    """Sorted by name; a head that is tied to the embedding is the embedding, and rotary tables are no weights."""
    named = {t.name: t for t in tensors if not t.name.endswith("rotary_emb.inv_freq")}
    if tied and TIED_EMBEDDING in named:
        named.pop(TIED_HEAD, None)
    return tuple(named[n] for n in sorted(named))


def end_tokens(sources: Iterable[dict[str, Any]]) -> tuple[int, ...]:
    """Every eos_token_id of config and generation config, in order, each once."""
    ids: list[int] = []
    for source in sources:
        value = source.get("eos_token_id")
        ids += [value] if isinstance(value, int) else list(value or ())
    return tuple(dict.fromkeys(ids))


def _is_tied(config: dict[str, Any]) -> bool:
    inner = config.get("text_config") or {}
    return bool(config.get("tie_word_embeddings", inner.get("tie_word_embeddings", False)))


def _tokenizer_digest(file: Path) -> str:
    return xxhash.xxh3_128_hexdigest(file.read_bytes()) if file.is_file() else ""


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text())
    except FileNotFoundError:
        raise ModelFolderError(f"--model {file.parent}: no {file.name}; expected a Hugging Face checkpoint") from None
    except ValueError as error:
        raise ModelFolderError(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelFolderError(f"{file} holds a {type(value).__name__}, expected an object")
    return value
