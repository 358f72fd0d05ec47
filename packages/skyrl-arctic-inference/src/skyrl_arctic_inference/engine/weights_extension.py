"""How staged bytes become the live weights inside a vLLM worker; vLLM mixes this class into its own worker.

Linear weights are repacked after loading and the parameter is emptied, so a plain `load_weights` fails: vLLM's
layerwise reload brings the original parameters back, loads, repacks, and copies into the storage that the kernels use.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

TORCH_DTYPES = {
    "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f8_e4m3": torch.float8_e4m3fn,
    "f8_e5m2": torch.float8_e5m2, "i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8,
    "u8": torch.uint8,
}  # fmt: skip
Row = tuple[str, str, Sequence[int], int]


class WeightsExtension:
    """Methods that `collective_rpc` calls by name in every worker."""

    device: torch.device
    model_runner: Any
    model_config: Any
    vllm_config: Any

    def load_staged_weights(self, path: str, rows: Sequence[Row]) -> int:
        """Replaces every parameter by the staged one and returns how many tensors were read.

        path: memory to map. rows: (name, dtype, shape, offset) of every tensor. Raises ValueError when a parameter of
        the model got no value: the model is then unusable.
        """
        model = self.model_runner.get_model()
        expected = {name for name, _ in model.named_parameters()}
        with open(path, "rb") as file:
            staged = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # private: torch wants it writable
        with set_current_vllm_config(self.vllm_config), torch.device(self.device):
            initialize_layerwise_reload(model)
            loaded = model.load_weights(_tensors(staged, rows))
            finalize_layerwise_reload(model, self.model_config)
            _repack_tied_heads(model, tied=self.model_config.hf_text_config.tie_word_embeddings)
        if loaded is not None and (missing := sorted(expected - set(loaded))):
            raise ValueError(f"{len(missing)} parameters got no new value: {', '.join(missing[:5])}")
        return len(rows)


def _repack_tied_heads(model: torch.nn.Module, *, tied: bool) -> None:
    """Gives an LM head that is tied to the embedding its new weights.

    No tensor of the checkpoint is its own, so the reload passes it by, and on CPU it would go on with the copy that it
    packed at the start: correct hidden states, old logits.
    """
    if not tied:
        return
    modules = list(model.modules())
    heads = [m for m in modules if isinstance(m, ParallelLMHead)]
    embeddings = [m for m in modules if isinstance(m, VocabParallelEmbedding) and not isinstance(m, ParallelLMHead)]
    for head in heads:
        (embedding,) = embeddings  # more than one would leave open which of them it is tied to
        head.tie_weights(embedding)
        head.quant_method.process_weights_after_loading(head)


def _tensors(staged: mmap.mmap, rows: Sequence[Row]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, dtype, shape, offset in rows:
        count = 1
        for d in shape:
            count *= d
        flat = torch.frombuffer(staged, dtype=TORCH_DTYPES[dtype], count=count, offset=offset)
        yield name, flat.view(tuple(shape))
