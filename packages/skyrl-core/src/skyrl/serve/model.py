"""A causal language model of `transformers` over KV slots: ragged rows in, logits out, and weights swapped in place."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from skyrl_rollout.reference.model import ModelFolder
from skyrl_rollout.server.engine import ModelIdentity
from skyrl_rollout.weights.manifest import TensorLayout
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl.serve.kv_slots import KvSlots, Places, rounded
from skyrl.train.policy.publishing import TORCH_DTYPES, WIRE_DTYPES

ATTENTIONS = ("full_attention", "sliding_attention")
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class Fed:
    """The next tokens of one row: they stand from `position` on, and their KV goes into `slot`."""

    slot: int
    position: int
    token_ids: Sequence[int]


class ServedModel:
    """One loaded model. All calls come from one thread."""

    def __init__(self, folder: Path, *, device: str, dtype: str, max_context: int | None) -> None:
        """dtype: "auto" is float32 on a CPU and the checkpoint's own on a GPU. Raises ValueError for a folder, dtype or
        architecture that cannot be served exactly."""
        stored = ModelFolder(folder).identity
        wire_dtype = _wire_dtype(dtype, device, stored.dtype)
        self.device = torch.device(device)
        self.module = _load(folder, TORCH_DTYPES[wire_dtype]).to(self.device)
        self._text_config = self.module.config.get_text_config()
        _refuse_inexact(self._text_config)
        self._tensors = _named_tensors(self.module, stored.tensors)
        self.identity = _identity(stored, self._tensors, wire_dtype, max_context)
        self.tokenizer = (
            AutoTokenizer.from_pretrained(folder, local_files_only=True) if stored.tokenizer_digest else None
        )
        self._cache_argument = cache_argument(self.module)
        self.kv = KvSlots()

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        c = self._text_config
        heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
        size = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        return int(2 * c.num_hidden_layers * heads * size * self.module.dtype.itemsize)

    @torch.inference_mode()
    def feed(self, rows: Sequence[Fed], *, every_logit: bool = False) -> torch.Tensor:
        """float32 [R, 1, V]: the logits after the last token of each row; with every_logit [R, Q, V], those of a
        shorter row on the right. KV of all earlier tokens must be in the slots."""
        longest = max(len(row.token_ids) for row in rows)
        ids_RQ = torch.tensor([[0] * (longest - len(r.token_ids)) + list(r.token_ids) for r in rows])
        positions_RQ = torch.tensor(
            [[-1] * (longest - len(r.token_ids)) + list(range(r.position, r.position + len(r.token_ids))) for r in rows]
        )
        width = max(row.position + len(row.token_ids) for row in rows)
        self.kv.fit(max(row.slot for row in rows) + 1, width)
        width = min(rounded(width), self.kv.width)
        places = Places([row.slot for row in rows], positions_RQ.to(self.device), width)
        self.kv.aim(places)
        answer = self.module(
            input_ids=ids_RQ.to(self.device),
            attention_mask=self._masks(places),
            position_ids=places.positions_RQ.clamp(min=0),
            use_cache=True,
            logits_to_keep=0 if every_logit else 1,
            **{self._cache_argument: self.kv},
        )
        return answer.logits.float()

    @torch.inference_mode()
    def load(self, tensors: Iterable[tuple[TensorLayout, memoryview]]) -> None:
        """Copies new values into the parameters, so that no second model is held. Raises RuntimeError when a tensor got
        no value, or one that does not fit; the model is unusable then."""
        missing = set(self._tensors)
        for layout, data in tensors:
            target = self._tensors.get(layout.name)
            if target is None or tuple(target.shape) != layout.shape:
                raise RuntimeError(f"the model has no tensor {layout.name} of shape {list(layout.shape)}")
            target.copy_(from_bytes(layout, data))
            missing.discard(layout.name)
        if missing:
            raise RuntimeError(f"{len(missing)} tensors got no value, {min(missing)} among them")

    def _masks(self, places: Places) -> torch.Tensor | dict[str, torch.Tensor]:
        """What each column may attend to: earlier positions of its row and itself; all of it in a padding column, whose
        result nobody reads."""
        keys_K = torch.arange(places.width, device=self.device)
        queries_RQ1 = places.positions_RQ[:, :, None]
        seen = (keys_K <= queries_RQ1) | (queries_RQ1 < 0)
        window = getattr(self._text_config, "sliding_window", None)
        near = seen & ((queries_RQ1 - keys_K < window) | (queries_RQ1 < 0)) if window else seen
        kinds = getattr(self._text_config, "layer_types", None)
        if kinds is None:
            return self._as_mask(near)
        masks = {"full_attention": seen, "sliding_attention": near}
        used = {kind: self._as_mask(masks[kind]) for kind in set(kinds)}
        return used if len(used) > 1 else next(iter(used.values()))

    def _as_mask(self, allowed_RQK: torch.Tensor) -> torch.Tensor:
        allowed = allowed_RQK[:, None]
        if self.module.config._attn_implementation != "eager":
            return allowed
        dtype = self.module.dtype
        return torch.zeros(allowed.shape, dtype=dtype, device=self.device).masked_fill(~allowed, torch.finfo(dtype).min)


def from_bytes(layout: TensorLayout, data: memoryview) -> torch.Tensor:
    """A tensor over the bytes, without a copy."""
    flat = torch.frombuffer(data, dtype=torch.uint8) if layout.nbytes else torch.empty(0, dtype=torch.uint8)
    return flat.view(TORCH_DTYPES[layout.dtype]).view(layout.shape)


def _wire_dtype(dtype: str, device: str, stored: str) -> str:
    if dtype == "auto":
        return "f32" if device == "cpu" else stored
    if dtype not in TORCH_DTYPES or not TORCH_DTYPES[dtype].is_floating_point:
        raise ValueError(f"--dtype {dtype}: expected auto, float32, bfloat16 or float16")
    return WIRE_DTYPES[TORCH_DTYPES[dtype]]


def _load(folder: Path, dtype: torch.dtype) -> Any:
    try:
        module = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except (OSError, KeyError) as error:
        raise ValueError(f"--model {folder}: transformers cannot load it: {error}") from error
    return module.eval().requires_grad_(False)


def _refuse_inexact(config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or ())
    if strange := kinds - set(ATTENTIONS):
        raise ValueError(f"layers of kind {', '.join(sorted(strange))} cannot be served here, only {ATTENTIONS}")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in LENGTH_DEPENDENT_ROPE:
        raise ValueError(
            f"rope_type {rope['rope_type']!r} depends on the longest row of a batch, and with it every sample on its "
            f"neighbours: choose another server for this model"
        )


def _named_tensors(module: torch.nn.Module, stored: Sequence[TensorLayout]) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers under the checkpoint's names, tied ones once."""
    named: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name, tensor in module.state_dict().items():
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if key not in seen or not tensor.numel():
            named[name] = tensor
        seen.add(key)
    wanted = {t.name: t.shape for t in stored if t.name in named or not t.name.endswith("rotary_emb.inv_freq")}
    found = {name: tuple(tensor.shape) for name, tensor in named.items()}
    if different := sorted(set(wanted.items()) ^ set(found.items())):
        raise ValueError(
            f"this version of transformers names {len(different)} tensors otherwise than the checkpoint, "
            f"{different[0][0]} among them: weights could not be published under the checkpoint's names"
        )
    return named


def _identity(
    stored: ModelIdentity, tensors: dict[str, torch.Tensor], wire_dtype: str, max_context: int | None
) -> ModelIdentity:
    layouts = tuple(TensorLayout(name, WIRE_DTYPES[t.dtype], tuple(t.shape)) for name, t in sorted(tensors.items()))
    context = stored.max_context if max_context is None else max_context
    if not 1 <= context <= stored.max_context:
        raise ValueError(f"--max-model-len {max_context}: expected 1 to {stored.max_context}, the model's own")
    return replace(stored, dtype=wire_dtype, tensors=layouts, max_context=context)


def cache_argument(module: torch.nn.Module) -> str:
    """How this version of transformers calls the KV that it is given."""
    known = inspect.signature(inspect.unwrap(module.forward)).parameters
    return "cache" if "cache" in known else "past_key_values"
