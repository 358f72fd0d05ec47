"""A head tied to the embedding but held in a module of its own (Llama) takes part in a publish."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from serve_process import ServeProcess, need_environment
from served_model import ServedModel
from skyrl_rollout.client import RolloutClient
from skyrl_rollout.tokens import LogprobMode, Sampling
from test_weight_swap import Trainer
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sizes that the CPU kernels pack, unlike the tiny model's vocabulary of 100."""
    folder = tmp_path_factory.mktemp("tied") / "llama"
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama_server(folder: Path) -> Iterator[ServeProcess]:
    need_environment()
    with ServeProcess(folder, "--max-model-len", "256", "--max-num-seqs", "16") as running:
        yield running


async def test_logprobs_follow_every_publish(llama_server: ServeProcess, folder: Path) -> None:
    model = ServedModel(folder)
    async with await RolloutClient.connect(llama_server.url, timeout_s=20) as client:
        trainer = Trainer(client)
        for seed in (1, 2):
            other = model.perturbed(seed)
            await trainer.publish(other)
            model.use(other)
            for prompt in model.prompts(4):
                sampling = Sampling(max_tokens=16, temperature=1.0, seed=1, ignore_eos=True)
                answer = await client.generate(prompt, sampling, mode=LogprobMode.TEMPERATURE, timeout_s=60)
                sample = answer.samples[0]
                gap = np.abs(sample.logprobs - model.logprobs(prompt, sample.token_ids, 1.0))
                assert gap.mean() <= 2e-5, f"publish {seed}: mean |server - transformers| {gap.mean():.2e}"
        trainer.publisher.close()
