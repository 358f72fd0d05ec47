"""A rollout server is swapped by its URL, and a publish really changes what it serves."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from skyrl.train.data.arithmetic import ALL_PROBLEMS
from skyrl_rollout.client import RolloutClient
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.tokens import LogprobMode, Sampling
from training_run import ROOT, TrainingRun
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_server import TINY_MODEL, VllmServer

PROMPTS = 32
NEW_TOKENS = 4
SMALL_STEPS = (
    "trainer.train_batch_size=8",
    "trainer.policy_mini_batch_size=8",
    "generator.n_samples_per_prompt=4",
    "trainer.eval_interval=-1",
    "trainer.eval_before_train=false",
)


def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    chosen = ALL_PROBLEMS[:: len(ALL_PROBLEMS) // PROMPTS][:PROMPTS]
    return [tokenizer(problem.prompt, add_special_tokens=False)["input_ids"] for problem in chosen]


async def served(url: str) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens of the server for every prompt, with their logprobs."""
    client = await RolloutClient.connect(url)
    try:
        generations = await asyncio.gather(
            *(
                client.generate(
                    np.asarray(p, dtype=np.int32),
                    Sampling(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True),
                    mode=LogprobMode.RAW,
                    timeout_s=120,
                )
                for p in prompts()
            )
        )
        return [(g.samples[0].token_ids.tolist(), g.samples[0].logprobs.tolist()) for g in generations]
    finally:
        await client.close()


def recomputed(export: Path) -> list[tuple[list[int], list[float]]]:
    """The same from `transformers` on an exported folder."""
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    rows = []
    for prompt in prompts():
        ids, logprobs = list(prompt), []
        for _ in range(NEW_TOKENS):
            with torch.no_grad():
                step = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            ids.append(int(step.argmax()))
            logprobs.append(float(step.max()))
        rows.append((ids[len(prompt) :], logprobs))
    return rows


def serves(url: str, export: Path) -> bool:
    """Whether the server's greedy tokens and their logprobs are those of the export."""
    ours, theirs = recomputed(export), asyncio.run(served(url))
    same_tokens = [a[0] for a in ours] == [b[0] for b in theirs]
    gap = max(abs(x - y) for a, b in zip(ours, theirs, strict=True) for x, y in zip(a[1], b[1], strict=True))
    return same_tokens and gap < 1e-4


def train_to(folder: Path, url: str, step: int) -> Path:
    """Trains on to `step` against the server at `url`; the export of that step."""
    TrainingRun(
        folder,
        f"generator.inference_engine.external_server_urls=[{url}]",
        f"trainer.max_training_steps={step}",
        f"trainer.hf_save_interval={step}",
        f"trainer.ckpt_interval={step}",
        "trainer.resume_mode=latest",
        *SMALL_STEPS,
    ).run()
    return folder / f"exports/global_step_{step}/policy"


@pytest.mark.ci
@pytest.mark.timeout(900)
def test_the_server_serves_the_weights_of_the_step(tmp_path: Path) -> None:
    with VllmServer() as server:
        assert serves(server.url, TINY_MODEL)
        for step in (1, 50, 100):
            export = train_to(tmp_path / "run", server.url, step)
            assert serves(server.url, export), f"step {step}"
            assert not serves(server.url, TINY_MODEL), f"step {step} still serves the weights of step 0"


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_a_skipped_publish_is_noticed(tmp_path: Path) -> None:
    with VllmServer() as server:
        TrainingRun(
            tmp_path / "run",
            f"generator.inference_engine.external_server_urls=[{server.url}]",
            "trainer.max_training_steps=2",
            "trainer.hf_save_interval=2",
            "trainer.eval_interval=-1",
            "trainer.eval_before_train=false",
            entrypoint=[str(ROOT / "tests/seam/skips_the_last_publish.py")],
        ).run()
        assert not serves(server.url, tmp_path / "run/exports/global_step_2/policy")


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_only_the_url_changes(tmp_path: Path) -> None:
    steps = ("trainer.max_training_steps=2", "trainer.eval_interval=-1", "trainer.eval_before_train=false")
    with VllmServer() as vllm, ReferenceServer("--model", str(TINY_MODEL)) as reference:
        for name, url in (("vllm", vllm.url), ("reference", reference.url)):
            run = TrainingRun(tmp_path / name, *steps, f"generator.inference_engine.external_server_urls=[{url}]").run()
            assert sorted(run.steps()) == [1, 2]
