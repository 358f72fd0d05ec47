"""Which public recipes are refused, with exactly which message, and why that is right: read through by a person.

A refusal that is not here fails `test_recipes.py`, and so does a row that no longer holds.
"""

from __future__ import annotations

from dataclasses import dataclass

OWN, ARCTIC = "own", "arctic_rl"
BOTH = (OWN, ARCTIC)
MEGATRON_FOLDER = "train/megatron/"


@dataclass(frozen=True)
class Refusal:
    """told: the whole problem. why: what makes the refusal right. recipes: names of those that get it under each of
    `backends`, alone or with those of other rows."""

    told: str
    why: str
    recipes: tuple[str, ...]
    backends: tuple[str, ...] = BOTH


REFUSALS = (
    Refusal(
        "trainer.strategy=megatron: no Megatron engine here: choose a backend that needs none by trainer.backend "
        "(installed: arctic_rl), or write trainer.strategy=fsdp",
        "the engine is absent; the same recipe runs with trainer.backend=arctic_rl",
        (
            "train/algorithms/dapo/run_dapo_qwen3_30b_a3b_lora_megatron_aime",
            "train/delta_weight_sync/run_dapo_qwen3.5_35b_a3b_delta",
            "train/fully_async/fully_async_run_gsm8k_megatron_lora",
            "train/megatron/run_megatron",
            "train/megatron/run_megatron_dapo_mimo_7b_rl",
            "train/megatron/run_megatron_dapo_qwen3.5_9b",
            "train/megatron/run_megatron_dapo_qwen3.6_27b_lora",
            "train/megatron/run_megatron_dapo_qwen3.6_35b_a3b_lora_int4_qat",
            "train/megatron/run_megatron_dapo_qwen3_235b_a22b_lora",
            "train/megatron/run_megatron_dapo_qwen3_30b_a3b",
            "train/megatron/run_megatron_dapo_qwen3_30b_a3b_lora",
            "train/megatron/run_megatron_dapo_qwen3_4b",
            "train/megatron/run_megatron_dapo_qwen3_4b_lora",
            "train/megatron/run_megatron_lora_qwen3-30b-a3b",
            "train/megatron/run_megatron_moonlight",
            "train/megatron/run_megatron_nemotron_mini_4b",
            "train/megatron/run_megatron_qwen3-235b-a22b",
            "train/megatron/run_megatron_qwen3-30b-a3b",
            "train/megatron/run_megatron_qwen3.5_35b_a3b",
            "train/spec_decode/run_megatron_dapo_mimo_7b_rl_specdecode",
            "train/spec_decode/run_search_megatron_mimo_7b_specdecode",
            "train/text_to_sql/run_skyrl_sql_megatron_lora",
            "train_scripts/full_context/run_full_ctx_megatron",
        ),
        (OWN,),
    ),
    Refusal(
        "trainer.mtp.enabled=true: no multi-token-prediction head is trained here: leave the section out; a draft "
        "model that is trained already goes into generator.inference_engine.speculative_config",
        "Megatron trains that head, and leaving it out would train another model",
        (
            "train/spec_decode/run_megatron_dapo_mimo_7b_rl_specdecode",
            "train/spec_decode/run_search_megatron_mimo_7b_specdecode",
        ),
        (ARCTIC,),
    ),
    Refusal(
        "trainer.policy.model.fake_int4_qat.enabled=true: no training on weights rounded to int4 here: leave the "
        "section out, and weights keep their precision",
        "leaving it out would train another model",
        ("train/megatron/run_megatron_dapo_qwen3.6_35b_a3b_lora_int4_qat",),
        (ARCTIC,),
    ),
    Refusal(
        "generator.inference_engine.external_proxy_url: write generator.inference_engine.external_server_urls="
        "['grpc://host:port'] (the trainer balances over the servers itself) instead",
        "the recipe names HTTP servers of its own; rollout servers here speak gRPC",
        (
            "train/fully_async/sim_trainer/run_fully_async_sim_gsm8k_external",
            "train/remote_inference_server/run_remote",
        ),
    ),
    Refusal(
        "generator.inference_engine.enable_pd=true: no servers that only prefill or only decode here: leave it out, "
        "with num_prefill and kv_transfer_config, and every server does both",
        "it needs an absent KV transport between servers",
        ("train/gsm8k/run_gsm8k_pd",),
    ),
    Refusal(
        "generator.enable_child_agents, generator.train_child_trajectories: the generator of recursive agents is not "
        "part of this project",
        "its keys belong to a generator that the public example brings",
        ("train/rlm/run_multi_paper_rlm",),
    ),
    Refusal(
        "trainer.placement.reward_num_nodes: unknown key; did you mean trainer.placement.ref_num_nodes?",
        "stale: public SkyRL refuses it too",
        ("train/text_to_sql/run_sql_fsdp_2node",),
    ),
    Refusal(
        "generator.vision_language_generator=true: no vision-language model is trained here: only prompts of text",
        "it trains on images",
        ("train/geometry3k/run_geometry3k_lora", "train/visgym/run_visgym_from_instruct"),
    ),
    Refusal(
        "harbor_trial_config.trials_dir, generator.rate_limit.enabled, generator.rate_limit.trajectories_per_second, "
        "generator.rate_limit.max_concurrency: Harbor, which runs these trials, is not part of this project",
        "it needs Harbor",
        ("train_integrations/harbor/run_codecontest_fully_async",),
    ),
)


def told_to(recipe: str, backend: str) -> tuple[str, ...]:
    """Every problem that this recipe is refused with, sorted; none where it is accepted."""
    return tuple(sorted(row.told for row in REFUSALS if recipe in row.recipes and backend in row.backends))
