"""Multi-turn episodes through vLLM: every token is one that the engine saw, and public kinds of recipe train on them.

One server for the file; the tiny model knows no tools and no `####`, so that what is looked at are tokens and versions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import skyrl.train.quickstart
import torch
from search_service import SearchService, search_service
from skyrl.train import backends
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.data import gsm8k
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.generator.env_generator import EnvGenerator
from skyrl.train.generator.trajectory import PromptTask, Trajectory
from skyrl.train.rollouts.service import RolloutService
from skyrl_gym.envs.search.env import SearchEnv
from skyrl_rollout.reference.process import ServedProcess
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.ci, pytest.mark.timeout(600)]
QUICKSTART = Path(skyrl.train.quickstart.__file__).parent
TINY_MODEL = QUICKSTART / "tiny_model"
BINARY = Path(__file__).parents[3] / ".venvs/server/bin/arctic-serve"
TURNS, STEPS = 3, 2


def ask_with_everything(env: SearchEnv, action: str) -> list[str | None]:
    """In place of the query between <search> tags, which the tiny model does not write: all that it said."""
    return [action]


def begins_with_a_digit(env: SearchEnv, action: str, done: bool) -> float:
    """In place of the answer between <answer> tags."""
    return float(done and action[:1].isdigit())


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    """A server of its own: one that the launcher starts ends with the first run of this process."""
    if not BINARY.exists():
        pytest.skip("the server environment .venvs/server is not built: run `uv run tools/serve.py --sync-only`")
    flags = ("--enforce-eager", "--max-model-len", "512")
    command = [str(BINARY), "--model", str(TINY_MODEL), "--listen", "127.0.0.1:0", *flags]
    with ServedProcess(command, start_timeout_s=240.0) as server:
        yield server.url


def trainer_logprobs(model: torch.nn.Module, t: Trajectory, temperature: float) -> np.ndarray:
    """float32 [R]: log_softmax(logits / temperature) of every response token."""
    ids = torch.tensor(np.concatenate([t.prompt_token_ids, t.response_token_ids])[None], dtype=torch.int64)
    with torch.no_grad():
        logits = model(ids).logits[0, len(t.prompt_token_ids) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(-1, ids[0, len(t.prompt_token_ids) :, None])[:, 0].numpy()


async def test_a_forward_pass_over_the_trajectory_gives_the_engines_logprobs(
    server_url, tmp_path, tiny_tokenizer, chat_tokenizer
):
    sampling = {"max_generate_length": 6, "temperature": 0.7}
    engine = {"external_server_urls": [server_url]}
    generator_keys = {"max_turns": 3, "max_input_length": 500, "sampling_params": sampling, "inference_engine": engine}
    cfg = SkyRLTrainConfig.model_validate({"trainer": {"log_path": str(tmp_path)}, "generator": generator_keys})
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
    tasks = [
        PromptTask(
            str(i),
            [{"role": "user", "content": f"{i}2+3="}],
            "gsm8k_multi_turn",
            {"reward_spec": {"ground_truth": "0"}},
        )
        for i in range(4)
    ]
    service = await RolloutService.open(cfg, TINY_MODEL)
    try:
        for tokenizer in (tiny_tokenizer, chat_tokenizer):
            generator = EnvGenerator(cfg, tokenizer, service.pool)
            trajectories = await generator.generate(
                tasks, n_samples=2, sampling=generator.train_sampling, step=1, phase="train"
            )
            assert {t.num_turns for t in trajectories} == {3}
            for t in trajectories:
                gap = np.abs(trainer_logprobs(model, t, 0.7) - t.rollout_logprobs)[t.loss_mask > 0]
                assert gap.max() < 1e-4
                assert gap.mean() < 5e-6
    finally:
        await service.close()


def multi_turn_gsm8k(folder: Path, service: SearchService) -> list[str]:
    """Rows by the preparation script, from the data set's own form."""
    raw = folder / "raw"
    raw.mkdir()
    rows = [{"question": f"What is {i} + 2?", "answer": f"{i} + 2\n#### {i + 2}"} for i in range(8)]
    for split in ("train", "test"):
        (raw / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    gsm8k.prepare(folder, source=str(raw), max_turns=TURNS)
    return [
        f"data.train_data={folder}/train.parquet", f"data.val_data={folder}/validation.parquet",
        "environment.env_class=gsm8k_multi_turn",
    ]  # fmt: skip


def search(folder: Path, service: SearchService) -> list[str]:
    """The flags of the public search recipe; the lengths are the tiny model's."""
    scored = {"data_source": "sums", "reward_spec": {"ground_truth": {"target": ["0"]}}}
    rows = [{"prompt": [{"role": "user", "content": f"{i}+2="}], **scored} for i in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "data.train_data=rows.jsonl", "data.val_data=rows.jsonl", "environment.env_class=search",
        "environment.skyrl_gym.max_env_workers=16", "environment.skyrl_gym.search.log_requests=false",
        f"environment.skyrl_gym.search.search_url={service.url}", "environment.skyrl_gym.search.topk=1",
        'generator.sampling_params.stop=["</search>", "</answer>"]', "trainer.algorithm.kl_loss_coef=0.001",
        "trainer.algorithm.use_kl_loss=true", "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
        "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high=2.0",
        "generator.append_eos_token_after_stop_str_in_multi_turn=true",
    ]  # fmt: skip


@pytest.mark.parametrize("recipe", [multi_turn_gsm8k, search])
def test_both_kinds_of_recipe_train_through_vllm(recipe, server_url, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(SearchEnv, "_parse_action", ask_with_everything)
    monkeypatch.setattr(SearchEnv, "_get_reward", begins_with_a_digit)
    with search_service() as service:
        cfg, plugin = backends.resolve(
            [
                f"@{QUICKSTART / 'embedded.yaml'}", *recipe(tmp_path, service), "generator.batched=false",
                f"generator.max_turns={TURNS}", "generator.max_input_length=480", "trainer.max_prompt_length=300",
                "generator.n_samples_per_prompt=4", "generator.use_conversation_multi_turn=true",
                f"generator.inference_engine.external_server_urls={server_url}", "trainer.train_batch_size=8",
                "trainer.policy_mini_batch_size=4", f"trainer.max_training_steps={STEPS}", "trainer.epochs=2",
                "trainer.algorithm.use_entropy_loss=true", "trainer.eval_before_train=false",
                "trainer.eval_interval=0", "trainer.ckpt_interval=0", "trainer.hf_save_interval=0",
                "trainer.logger=jsonl", "trainer.progress=false", "trainer.dump_data_batch=true",
            ],
            announce=lambda line: None,
        )  # fmt: skip
        BasePPOExp(cfg, plugin).run()
    rows = [json.loads(line) for line in (cfg.trainer.log_folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["trainer/global_step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["policy/grad_norm"] > 0
        assert row["policy/rollout_train_logprobs_abs_diff_max"] < 1e-4
        assert row["policy/rollout_train_logprobs_num_invalid"] == 0
        assert row["generate/avg_num_tokens"] > row["generate/avg_assistant_tokens"]
    # the second step's tokens are those of the weights that the first one published
    assert rows[1]["generate/weight_version_min"] == rows[0]["generate/weight_version_max"] + 1
    dumped = Path(cfg.trainer.export_path) / "dumped_data" / "global_step_2_trajectories.jsonl"
    episodes = [json.loads(line)["messages"] for line in dumped.read_text().splitlines()]
    assert len(episodes) == 32
    assert {sum(m["role"] == "assistant" for m in messages) for messages in episodes} == {TURNS}
    if recipe is search:
        said = [m["content"] for messages in episodes for m in messages if m["role"] == "assistant"]
        asked = [request["query"] for request in service.requests]
        assert len(asked) == STEPS * 32 * (TURNS - 1) and set(asked) & {text.strip() for text in said}
        told = [m["content"] for messages in episodes for m in messages if m["role"] == "user"]
        assert sum("<information>" in text and "Doc 1:" in text for text in told) == 32 * (TURNS - 1)
