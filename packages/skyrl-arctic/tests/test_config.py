"""The integration's keys: what each becomes, what cannot be honoured, and that every way in reads the same."""

from __future__ import annotations

import pickle
import re
from importlib.resources import files
from typing import Any

import pytest
import torch
from arctic_rl.config import (
    ArcticRLTrainerConfig,
    ArcticSkyRLConfig,
    ArcticTrainerConfig,
    build_rl_config,
)
from arctic_rl.entrypoint import PLUGIN, on_this_backend, over_embedded_run
from skyrl.train import backends
from skyrl.train.config import AlgorithmConfig, SkyRLTrainConfig, key
from skyrl.train.config.problems import ConfigError

ON_CPU = "trainer.device=cpu"


def configured(*argv: str) -> Any:
    return backends.resolve([*argv, ON_CPU, "trainer.backend=arctic_rl"], announce=lambda line: None)[0]


def reported(*argv: str) -> Any:
    keys = tuple(a.partition("=")[0] for a in argv)
    assert PLUGIN.report is not None
    return PLUGIN.report(configured(*argv), keys)


def test_the_39_public_keys_are_known() -> None:
    assert len(ArcticRLTrainerConfig.model_fields) == 39


def test_an_empty_section_and_none_mean_the_defaults() -> None:
    expected = ArcticRLTrainerConfig()
    for written in ("trainer.arctic_rl={}", "trainer.arctic_rl=null", "trainer.seed=42"):
        assert configured(written).trainer.arctic_rl == expected


def test_an_unknown_key_of_the_section_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=re.escape("trainer.arctic_rl.zero_stge") + ".*zero_stage"):
        configured("trainer.arctic_rl.zero_stge=2")


@pytest.mark.parametrize("wrong", ["zero_stage=4", "zero_stage=two", "optimizer_betas=0.9", "lr_warmup_ratio=2"])
def test_a_value_of_the_wrong_kind_is_refused_with_its_key(wrong: str) -> None:
    with pytest.raises(ConfigError, match="trainer.arctic_rl." + wrong.partition("=")[0]):
        configured(f"trainer.arctic_rl.{wrong}")


def test_the_configuration_survives_the_way_to_a_worker_process() -> None:
    cfg = configured("trainer.arctic_rl.zero_stage=2")
    assert pickle.loads(pickle.dumps(cfg)) == cfg
    assert isinstance(cfg.trainer, ArcticTrainerConfig)


def test_an_entrypoint_with_an_algorithm_of_its_own_keeps_it() -> None:
    class WithBuffer(AlgorithmConfig):
        """What a DAPO-style entrypoint adds."""

        my_buffer_len: int = key(0, "An extension's own key.")

    cfg, _ = backends.resolve(
        ["trainer.backend=arctic_rl", "trainer.algorithm.my_buffer_len=7", "trainer.arctic_rl.zero_stage=2"],
        {"algorithm_cls": WithBuffer},
        announce=lambda line: None,
    )
    assert (cfg.trainer.algorithm.my_buffer_len, cfg.trainer.arctic_rl.zero_stage) == (7, 2)


# Names of one setting


@pytest.mark.parametrize(
    ("ours", "value", "read"),
    [
        ("optimizer_betas", "[0.9,0.95]", lambda cfg: cfg.trainer.policy.optimizer_config.adam_betas == (0.9, 0.95)),
        ("lr_scheduler_type", "cosine", lambda cfg: cfg.trainer.policy.optimizer_config.scheduler == "cosine"),
        ("enable_gradient_checkpointing", "false", lambda cfg: cfg.trainer.gradient_checkpointing is False),
        ("vllm_max_num_seqs", "7", lambda cfg: cfg.generator.inference_engine.max_num_seqs == 7),
        ("vllm_enforce_eager", "true", lambda cfg: cfg.generator.inference_engine.enforce_eager is True),
        ("vllm_enable_prefix_caching", "false", lambda cfg: not cfg.generator.inference_engine.enable_prefix_caching),
        ("vllm_max_num_batched_tokens", "9", lambda cfg: cfg.generator.inference_engine.max_num_batched_tokens == 9),
        ("startup_timeout", "1800", lambda cfg: cfg.generator.inference_engine.server_start_timeout_s == 1800),
        ("vllm_max_model_len", "4096", lambda cfg: engine_arguments(cfg) == {"max_model_len": 4096}),
        ("vllm_enable_chunked_prefill", "true", lambda cfg: engine_arguments(cfg) == {"enable_chunked_prefill": True}),
        ("vllm_config", "{swap_space: 4}", lambda cfg: engine_arguments(cfg) == {"swap_space": 4}),
        ("speculative_model", "/draft", lambda cfg: engine_arguments(cfg)["speculative_config"]["model"] == "/draft"),
        ("speculative_model", "", lambda cfg: engine_arguments(cfg) == {}),
    ],
)
def test_a_key_with_a_shared_name_sets_the_shared_key(ours: str, value: str, read: Any) -> None:
    written = f"trainer.arctic_rl.{ours}={value}"
    assert read(configured(written))
    assert set(reported(written).mapped) == {f"trainer.arctic_rl.{ours}"}


def engine_arguments(cfg: Any) -> dict[str, Any]:
    return dict(cfg.generator.inference_engine.engine_init_kwargs)


def test_a_shared_key_that_the_section_does_not_name_keeps_its_value() -> None:
    cfg = configured("trainer.policy.optimizer_config.adam_betas=[0.8,0.9]", "trainer.gradient_checkpointing=false")
    assert cfg.trainer.policy.optimizer_config.adam_betas == (0.8, 0.9)
    assert cfg.trainer.gradient_checkpointing is False


@pytest.mark.parametrize(
    "both",
    [
        ("trainer.arctic_rl.optimizer_betas=[0.9,0.95]", "trainer.policy.optimizer_config.adam_betas=[0.9,0.99]"),
        ("trainer.arctic_rl.vllm_max_num_seqs=4", "generator.inference_engine.max_num_seqs=8"),
        ("trainer.arctic_rl.vllm_config={a: 1}", "generator.inference_engine.engine_init_kwargs.a=2"),
    ],
)
def test_two_names_with_different_values_are_refused_naming_both(both: tuple[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        configured(*both)
    assert "trainer.arctic_rl" in str(caught.value)
    assert both[1].partition("=")[0] in str(caught.value)


def test_two_names_with_equal_values_are_fine() -> None:
    configured("trainer.arctic_rl.vllm_max_num_seqs=8", "generator.inference_engine.max_num_seqs=8")


def test_offloading_needs_a_stage_that_partitions() -> None:
    for written, needed in (("offload_optimizer", "zero_stage of 1"), ("offload_param", "zero_stage=3")):
        with pytest.raises(ConfigError, match=needed):
            configured(f"trainer.arctic_rl.{written}=true")


# Verdicts on keys


@pytest.mark.parametrize(
    ("written", "verdict"),
    [
        ("trainer.strategy=fsdp", "unused"),
        ("trainer.policy.fsdp_config.cpu_offload=true", "unused"),
        ("trainer.arctic_rl.host=elsewhere", "unused"),
        ("trainer.arctic_rl.use_zorro=true", "unused"),
        ("trainer.arctic_rl.colocate=true", "unused"),
        ("trainer.arctic_rl.use_arctic_inference=true", "unused"),
        ("trainer.arctic_rl.determinism_seed=3", "unused"),
        ("trainer.arctic_rl.logits_optimization_peak_mem_size_in_gib=1", "honoured"),
        ("trainer.policy.optimizer_config.offload_after_step=true", "unused"),
        ("trainer.arctic_rl.attn_implementation=flash_attention_3", "mapped"),
        ("trainer.arctic_rl.zero_stage=3", "honoured"),
        ("trainer.algorithm.eps_clip_high=0.3", "honoured"),
        ("trainer.policy_mini_batch_size=128", "honoured"),
        ("trainer.arctic_rl.use_liger=false", "honoured"),
    ],
)
def test_each_key_is_listed_under_what_becomes_of_it(written: str, verdict: str) -> None:
    found = reported(written)
    assert written.partition("=")[0] in getattr(found, verdict)


@pytest.mark.parametrize(
    "written",
    [
        "trainer.arctic_rl.use_liger=true",
        "trainer.arctic_rl.log_prob_gpus=1",
        "trainer.arctic_rl.ulysses_sequence_parallel_size=2",
        "trainer.arctic_rl.arctic_inference_config={use_fca: true}",
    ],
)
def test_a_value_that_cannot_be_honoured_is_an_error_that_says_what_to_do(written: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(written.partition("=")[0]) + "[^:]*: leave it out"):
        configured(written)


# What is derived


def test_every_shared_key_that_deepspeed_needs_arrives_there() -> None:
    cfg = configured(
        "trainer.arctic_rl.zero_stage=3",
        "trainer.arctic_rl.offload_optimizer=true",
        "trainer.arctic_rl.offload_param=true",
        "trainer.policy.optimizer_config.lr=2e-5",
        "trainer.policy.optimizer_config.weight_decay=0.1",
        "trainer.policy.optimizer_config.max_grad_norm=0.5",
        "trainer.policy.optimizer_config.num_warmup_steps=3",
        "trainer.placement.policy_num_gpus_per_node=2",
        "trainer.micro_train_batch_size_per_gpu=4",
        "trainer.train_batch_size=16",
        "trainer.policy_mini_batch_size=8",
        "generator.n_samples_per_prompt=4",
    )
    client = build_rl_config(cfg)
    zero = client.ds_config["zero_optimization"]
    assert (zero["stage"], zero["offload_optimizer"], zero["offload_param"]) == (
        3,
        {"device": "cpu"},
        {"device": "cpu"},
    )
    assert client.ds_config["gradient_clipping"] == 0.5
    assert client.ds_config["gradient_accumulation_steps"] == 1
    assert (client.training_gpus, client.ds_config["train_batch_size"]) == (2, 8)
    training = client.training_config
    assert training["optimizer"] | {"lr": 2e-5, "weight_decay": 0.1} == training["optimizer"]
    assert (training["train_batch_size"], training["mini_batch_size"], training["num_warmup_steps"]) == (64, 32, 3)


@pytest.mark.parametrize(
    ("device", "bf16", "expected"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)]
)
def test_bfloat16_is_computed_on_a_gpu_only_and_always_with_float32_copies(
    device: Any, bf16: bool, expected: bool
) -> None:
    client = build_rl_config(configured(f"trainer.bf16={str(bf16).lower()}"), device=device)
    assert ("bf16" in client.ds_config) == expected
    assert client.ds_worker_config["compute_dtype"] == (torch.bfloat16 if expected else torch.float32)
    assert client.ds_config["zero_optimization"]["stage"] == (1 if expected else 0)
    if expected:
        assert (
            client.ds_config["data_types"]["grad_accum_dtype"] == client.ds_config["communication_data_type"] == "fp32"
        )


def test_the_server_settings_come_from_the_shared_keys() -> None:
    engine = "generator.inference_engine"
    client = build_rl_config(
        configured(f"{engine}.tensor_parallel_size=2", f"{engine}.num_engines=3", f"{engine}.max_num_seqs=9")
    )
    assert (client.sampling_gpus, client.vllm_config["max_num_seqs"], client.vllm_config["dtype"]) == (6, 9, "float32")


def test_a_configuration_of_another_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="ArcticSkyRLConfig"):
        build_rl_config(SkyRLTrainConfig())
    assert build_rl_config(ArcticSkyRLConfig()).training_gpus == 1


def test_warm_up_by_ratio_and_by_steps_is_refused() -> None:
    cfg = configured("trainer.arctic_rl.lr_warmup_ratio=0.1", "trainer.policy.optimizer_config.num_warmup_steps=5")
    with pytest.raises(ValueError, match="lr_warmup_ratio"):
        build_rl_config(cfg)


# Doors


def test_every_door_reads_the_same_configuration() -> None:
    model = files("skyrl.train.quickstart") / "tiny_model"
    recipe = [f"trainer.policy.model.path={model}", "data.train_data=['/a.parquet']", "trainer.seed=3", ON_CPU]
    doors = [
        [*recipe, "trainer.backend=arctic_rl"],
        [*recipe, "trainer.backend=arctic_rl", "trainer.arctic_rl={}"],
        [*recipe, "trainer.override_entrypoint=integrations.arctic_rl.entrypoint"],
        on_this_backend(recipe),
        on_this_backend(over_embedded_run(recipe)),
    ]
    found = [backends.resolve(argv, announce=lambda line: None)[0] for argv in doors]
    assert all(cfg == found[0] for cfg in found)


def test_the_script_without_a_model_of_its_own_runs_the_embedded_run() -> None:
    cfg, plugin = backends.resolve(on_this_backend(over_embedded_run(["trainer.seed=2"])), announce=lambda line: None)
    assert (plugin.name, cfg.trainer.seed, cfg.environment.env_class) == ("arctic_rl", 2, "arithmetic")


def test_a_recipe_is_not_laid_over_the_embedded_run() -> None:
    recipe = ["data.train_data=['/a.parquet']"]
    assert over_embedded_run(recipe) == recipe


def test_the_own_door_takes_the_name_of_a_public_entrypoint() -> None:
    argv = on_this_backend(["trainer.override_entrypoint=examples.train.algorithms.dapo.main_dapo"])
    cfg, plugin = backends.resolve(argv, announce=lambda line: None)
    assert (plugin.name, cfg.trainer.algorithm.overlong_buffer_len) == ("arctic_rl", 512)


def test_the_own_door_refuses_another_backend() -> None:
    with pytest.raises(ConfigError, match="trainer.backend=fsdp"):
        on_this_backend(["trainer.backend=fsdp"])
    with pytest.raises(ConfigError, match="fsdp"):
        on_this_backend(["trainer.override_entrypoint=integrations.fsdp.entrypoint"])
