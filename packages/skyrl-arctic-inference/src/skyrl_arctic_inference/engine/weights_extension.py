"""How staged bytes become the live weights inside a vLLM worker; vLLM mixes this class into its own worker.

Linear weights are repacked after loading and the parameter is emptied, so a plain `load_weights` fails: vLLM's
layerwise reload brings the original parameters back, loads, repacks, and copies into the storage that the kernels use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from skyrl_arctic_inference.engine.adapters_extension import plain_layers
from skyrl_arctic_inference.engine.staged_tensors import Row, staged_tensors


class WeightsExtension:
    """Methods that `collective_rpc` calls by name in every worker."""

    device: torch.device
    model_runner: Any
    vllm_config: Any
    sleep: Any  # of vLLM's worker

    def load_staged_weights(self, path: str, rows: Sequence[Row]) -> int:
        """Replaces every parameter by the staged one and returns how many tensors were read.

        path: memory to map. rows: (name, dtype, shape, offset) of every tensor. Raises ValueError when a parameter of
        the model got no value: the model is then unusable.
        """
        replace_weights(self.model_runner, self.vllm_config, self.device, staged_tensors(path, rows))
        return len(rows)

    def sleep_and_count(self, level: int) -> int:
        """Gives accelerator memory back and returns how many bytes; the scheduler is paused and stays so."""
        before, _ = torch.accelerator.get_memory_info()
        self.sleep(level)
        return max(torch.accelerator.get_memory_info()[0] - before, 0)


def replace_weights(
    runner: Any, config: Any, device: torch.device, tensors: Iterator[tuple[str, torch.Tensor]]
) -> None:
    """Loads (name, tensor) of a whole checkpoint into the live model of a model runner. config: vLLM's VllmConfig.

    Raises ValueError when a parameter of the model got no value: the model is then unusable.
    """
    model = runner.get_model()
    with plain_layers(runner), set_current_vllm_config(config), torch.device(device):
        expected = {name for name, _ in model.named_parameters()}
        initialize_layerwise_reload(model)
        loaded = model.load_weights(tensors)
        finalize_layerwise_reload(model, config.model_config)
        _repack_tied_heads(model, tied=config.model_config.hf_text_config.tie_word_embeddings)
    if loaded is not None and (missing := sorted(expected - set(loaded))):
        raise ValueError(f"{len(missing)} parameters got no new value: {', '.join(missing[:5])}")


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
