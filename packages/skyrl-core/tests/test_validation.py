"""Rules between keys, each with the message that it gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.config.build import build
from skyrl.train.config.overrides import parse
from skyrl.train.config.problems import ConfigError
from skyrl.train.config.validation import validate

GAE = "trainer.algorithm.advantage_estimator=gae trainer.critic.model.path=a/critic"
TWO_WORKERS = "trainer.placement.policy_num_gpus_per_node=2"


def check(*argv: str) -> SkyRLTrainConfig:
    cfg = build(SkyRLTrainConfig, parse(argv)).cfg
    validate(cfg)
    return cfg


def test_the_defaults_break_no_rule() -> None:
    check()


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (
            "trainer.train_batch_size=4 trainer.policy_mini_batch_size=8",
            "trainer.policy_mini_batch_size=8: more prompts than trainer.train_batch_size=4",
        ),
        (
            "trainer.train_batch_size=10 trainer.policy_mini_batch_size=4",
            (
                "trainer.train_batch_size=10 must be a multiple of trainer.policy_mini_batch_size=4: set "
                "the mini-batch to 2, or the batch to 8 or 12"
            ),
        ),
        (
            (
                "trainer.train_batch_size=4 trainer.policy_mini_batch_size=2 generator.n_samples_per_prompt=2 "
                "trainer.placement.policy_num_gpus_per_node=8"
            ),
            "must give each of the 8 policy workers",
        ),
        ("generator.max_input_length=100", "must equal trainer.max_prompt_length=512 where generator.max_turns=1"),
        ("generator.max_input_length=100 generator.max_turns=2", "must be at least trainer.max_prompt_length=512"),
        (
            "trainer.policy.optimizer_config.scheduler=cosin",
            (
                "trainer.policy.optimizer_config.scheduler=cosin: known: constant, constant_with_warmup, cosine, "
                "cosine_with_restarts, inverse_sqrt, linear, polynomial; did you mean cosine?"
            ),
        ),
        (
            "trainer.critic.optimizer_config.scheduler=warmup_stable_decay",
            "trainer.critic.optimizer_config.scheduler=warmup_stable_decay: it needs settings of its own",
        ),
        ("trainer.policy.optimizer_config.scheduler=reduce_lr_on_plateau", "it follows a validation loss"),
        (
            "trainer.policy.optimizer_config.scheduler=polynomial trainer.policy.optimizer_config.lr=1e-8",
            "scheduler=polynomial falls to 1e-07: trainer.policy.optimizer_config.lr=1e-08 must be above that",
        ),
        ("generator.sampling_params.logprobs=5", "expected null, 0 or 1"),
        (
            "generator.eval_sampling_params.additional_kwargs.min_token=2",
            "generator.eval_sampling_params.additional_kwargs.min_token: no such sampling parameter; known: ",
        ),
        (
            "trainer.policy.fsdp_config.fsdp_size=3 trainer.placement.policy_num_gpus_per_node=4",
            "trainer.policy.fsdp_config.fsdp_size=3: expected -1, or a divisor of the 4 policy workers",
        ),
        (
            "trainer.ref.fsdp_config.fsdp_size=0",
            "trainer.ref.fsdp_config.fsdp_size=0: expected -1, or a divisor of the 1 ref workers",
        ),
        (
            (
                "trainer.policy.fsdp_config.reshard_after_forward=4 trainer.policy.fsdp_config.fsdp_size=2 "
                "trainer.placement.policy_num_gpus_per_node=4"
            ),
            "trainer.policy.fsdp_config.reshard_after_forward=4: expected true, false, or a divisor of the 2 workers",
        ),
        (
            "trainer.policy.model_config_kwargs.rope_parameters.rope_theta=5000",
            (
                "trainer.policy.model_config_kwargs.rope_parameters={'rope_theta': 5000} and generator."
                "inference_engine.engine_init_kwargs.hf_overrides.rope_parameters=null: trainer and servers must "
                "compute the same model"
            ),
        ),
        ("generator.sampling_params.temperature=0", "trainer.algorithm.temperature=0.0: expected more than 0"),
        (
            "trainer.algorithm.advantage_estimator=grop",
            "known: gae, grpo, maxrl, reinforce++, rloo; did you mean grpo?",
        ),
        (
            "trainer.algorithm.advantage_estimator=gae",
            "advantage_estimator=gae needs the values of a critic: set trainer.critic.model.path",
        ),
        (f"{GAE} trainer.critic.model.path=/nope", "trainer.critic.model.path=/nope: no such folder"),
        (
            f"{GAE} trainer.train_batch_size=512 trainer.critic_mini_batch_size=1024",
            "trainer.critic_mini_batch_size=1024: more prompts than trainer.train_batch_size=512",
        ),
        (
            f"{GAE} trainer.train_batch_size=512 trainer.critic_mini_batch_size=384",
            "trainer.train_batch_size=512 must be a multiple of trainer.critic_mini_batch_size=384: set the mini-batch",
        ),
        (
            f"{GAE} trainer.critic_mini_batch_size=1 trainer.placement.critic_num_gpus_per_node=8",
            "must give each of the 8 critic workers (trainer.placement.critic_num_nodes x critic_num_gpus_per_node)",
        ),
        (
            f"{GAE} trainer.placement.critic_num_gpus_per_node=2",
            "critic_num_gpus_per_node = 1 x 2 must equal the policy's 1 x 1 where all share devices",
        ),
        ("trainer.algorithm.value_clip=-1", "trainer.algorithm.value_clip=-1: expected at least 0"),
        ("trainer.critic.optimizer_config.lr=-1", "trainer.critic.optimizer_config.lr=-1: expected at least 0"),
        (
            "trainer.policy.model.lora.rank=8 generator.inference_engine.weight_sync_backend=delta",
            "trainer.policy.model.lora.rank=8 excludes generator.inference_engine.weight_sync_backend=delta",
        ),
        (
            "trainer.policy.model.lora.rank=8 trainer.update_ref_every_epoch=true",
            "trainer.update_ref_every_epoch=true with trainer.policy.model.lora.rank=8: the reference has no adapter",
        ),
        (
            "trainer.policy.model.lora.rank=8 trainer.policy.model.lora.init_method=kaimin",
            "lora.init_method=kaimin: known: gaussian, kaiming, orthogonal; did you mean kaiming?",
        ),
        (
            "trainer.policy.model.lora.rank=7 trainer.policy.model.lora.init_method=orthogonal",
            "init_method=orthogonal needs an even trainer.policy.model.lora.rank, not 7: take 8",
        ),
        (
            "trainer.policy.model.lora.rank=8 trainer.policy.model.lora.target_modules=[]",
            "trainer.policy.model.lora.target_modules is empty: expected all-linear, or a list",
        ),
        ("trainer.algorithm.kl_ctrl.type=adaptiv", "kl_ctrl.type=adaptiv: known: adaptive, fixed; did you mean"),
        ("trainer.algorithm.dppo.dppo_type=tv", "dppo.dppo_type=tv: known: binary_kl, binary_tv"),
        ("trainer.algorithm.dynamic_sampling.type=filtr", "known: filter, replace; did you mean filter?"),
        ("trainer.algorithm.off_policy_correction.tis_ratio_type=tok", "tis_ratio_type=tok: known: sequence, token"),
        (
            "trainer.algorithm.off_policy_correction.sequence_mask_metric=geo",
            "sequence_mask_metric=geo: known: geometric, product",
        ),
        ("trainer.algorithm.cispo.cispo_anchor=new", "trainer.algorithm.cispo.cispo_anchor=new: expected one of"),
        (
            "trainer.algorithm.use_kl_in_reward=true",
            "use_kl_in_reward=true and trainer.algorithm.use_kl_loss=true (its default) would count the KL twice",
        ),
        (
            (
                "trainer.algorithm.policy_loss_type=clip_cov "
                "trainer.algorithm.off_policy_correction.tis_ratio_type=token"
            ),
            "off_policy_correction.* does not go with trainer.algorithm.policy_loss_type=clip_cov",
        ),
        (
            (
                "trainer.algorithm.policy_loss_type=kl_cov "
                "trainer.algorithm.off_policy_correction.sequence_mask_metric=product"
            ),
            "off_policy_correction.* does not go with trainer.algorithm.policy_loss_type=kl_cov",
        ),
        (
            (
                "trainer.algorithm.policy_loss_type=cross_entropy "
                "trainer.algorithm.off_policy_correction.outlier_token_is_threshold_high=9"
            ),
            "does not go with trainer.algorithm.policy_loss_type=cross_entropy",
        ),
        (
            (
                "trainer.algorithm.policy_loss_type=cispo trainer.algorithm.cispo.cispo_anchor=rollout "
                "trainer.algorithm.off_policy_correction.tis_ratio_type=token"
            ),
            "tis_ratio_type=token: with trainer.algorithm.cispo.cispo_anchor=rollout",
        ),
        (
            "trainer.algorithm.old_logprobs=rollout trainer.algorithm.off_policy_correction.tis_ratio_type=token",
            "has nothing to correct where trainer.algorithm.old_logprobs=rollout",
        ),
        (
            "trainer.algorithm.off_policy_correction.token_mask_is_threshold_low=0.5",
            "token_mask_is_threshold_low is set without token_mask_is_threshold_high: set both, or neither",
        ),
        (
            (
                "trainer.algorithm.off_policy_correction.geo_mask_low=1.5 "
                "trainer.algorithm.off_policy_correction.geo_mask_high=1.5"
            ),
            "geo_mask_low=1.5 must be below trainer.algorithm.off_policy_correction.geo_mask_high=1.5",
        ),
        (
            "trainer.algorithm.overlong_buffer_len=2000",
            "must be at most generator.sampling_params.max_generate_length=",
        ),
        (
            "trainer.algorithm.overlong_buffer_len=20 generator.max_turns=2",
            "measures responses of one turn, and generator.max_turns=2: set it to 0",
        ),
        ("trainer.algorithm.policy_loss_type=dual", "did you mean dual_clip?"),
        ("trainer.algorithm.loss_reduction=token_meen", "did you mean token_mean?"),
        ("trainer.algorithm.kl_estimator_type=k9", "trainer.algorithm.kl_estimator_type=k9: known: abs, k1, k2, k3"),
        ("trainer.algorithm.loss_reduction=seq_mean_token_sum_norm", "divides by trainer.algorithm.max_seq_len"),
        ("trainer.logger=wanb", "did you mean wandb?"),
        ("trainer.logger=wandb", "WANDB_API_KEY is not set"),
        ("trainer.strategy=megatron", "trainer.strategy=megatron: no Megatron engine here"),
        ("trainer.placement.ref_num_gpus_per_node=2", "must equal the policy's 1 x 1"),
        ("trainer.placement.ref_num_nodes=2", "ref_num_gpus_per_node = 2 x 1 must equal the policy's 1 x 1"),
        (
            "generator.inference_engine.external_server_urls=http://host:8000",
            "write grpc://host:8000 (the server's gRPC port)",
        ),
        ("generator.inference_engine.external_server_urls=host:8000", "write grpc://host:port"),
        (
            (
                "generator.inference_engine.external_server_urls=unix:/s "
                "generator.inference_engine.run_engines_locally=true"
            ),
            "run_engines_locally=true contradicts external_server_urls",
        ),
        (
            "generator.inference_engine.external_server_urls=grpc://h:1 trainer.placement.colocate_all=true",
            "trainer.placement.colocate_all=true contradicts",
        ),
        ("generator.inference_engine.run_engines_locally=false", "needs the servers to connect to"),
        ("generator.inference_engine.weight_sync_backend=gloo", "known: auto, delta, inline, nccl, shm"),
        ("generator.inference_engine.distributed_executor_backend=x", "expected mp or ray"),
        (
            "generator.inference_engine.expert_parallel_size=4 generator.inference_engine.tensor_parallel_size=2",
            "expert_parallel_size=4: a server shares its experts over all of its GPUs: expected 1, or",
        ),
        (
            "trainer.policy.language_model_only=true",
            "trainer.policy.language_model_only=true and generator.inference_engine.language_model_only=false",
        ),
        ("generator.inference_engine.num_prefill=1", "num_prefill=1 is read with enable_pd=true only"),
        ("trainer.max_ckpts_to_keep=0", "expected -1 (keep all) or at least 1"),
        ("trainer.resume_mode=from_path", "needs trainer.resume_path"),
        ("trainer.resume_path=/x", "only read with trainer.resume_mode=from_path"),
        ("trainer.resume_mode=from_path trainer.resume_path=/x", "expected a folder named global_step_N"),
        ("trainer.resume_mode=from_path trainer.resume_path=/x/global_step_3", "no such folder"),
        ("trainer.ckpt_path=s3://bucket/run", "trainer.ckpt_path=s3://bucket/run: expected a folder on this machine"),
        ("trainer.policy.model.path=/nope", "trainer.policy.model.path=/nope: no such folder"),
    ],
)
def test_a_broken_rule_names_the_keys_and_what_to_do(argv: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with pytest.raises(ConfigError) as caught:
        check(*argv.split(" "))
    assert told in str(caught.value)


def test_a_critic_is_checked_only_where_an_estimator_reads_its_values() -> None:
    odd = "trainer.critic.model.path=/nope trainer.critic_mini_batch_size=1024 trainer.train_batch_size=512"
    check(*odd.split(" "))
    with pytest.raises(ConfigError, match="critic_mini_batch_size=1024"):
        check(*odd.split(" "), "trainer.algorithm.advantage_estimator=gae")
    check("trainer.placement.colocate_all=false", "trainer.placement.critic_num_gpus_per_node=2", *GAE.split(" "))


def test_a_folder_without_a_checkpoint_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        check(f"trainer.policy.model.path={tmp_path}")


def test_urls_imply_that_nothing_is_started_or_shared() -> None:
    cfg = check("generator.inference_engine.external_server_urls=grpc://h:1")
    assert cfg.generator.inference_engine.external_server_urls == ("grpc://h:1",)
    assert not cfg.generator.inference_engine.run_engines_locally
    assert not cfg.trainer.placement.colocate_all


@pytest.mark.parametrize(
    ("argv", "read", "derived"),
    [
        ("trainer.policy.model.path=a/b", lambda c: c.trainer.ref.model.path, "a/b"),
        ("generator.sampling_params.temperature=0.7", lambda c: c.trainer.algorithm.temperature, 0.7),
        ("trainer.max_prompt_length=99", lambda c: c.generator.max_input_length, 99),
        (
            "generator.sampling_params.max_generate_length=77 generator.eval_sampling_params.top_p=0.5",
            lambda c: c.generator.eval_sampling_params.max_generate_length,
            77,
        ),
        (
            "generator.eval_sampling_params.top_p=0.5",
            lambda c: c.generator.eval_sampling_params.temperature,
            0.0,
        ),
    ],
)
def test_what_is_unset_follows_the_key_that_it_belongs_to(argv: str, read: Any, derived: Any) -> None:
    assert read(check(*argv.split(" "))) == derived


@pytest.mark.parametrize(
    "argv",
    [
        TWO_WORKERS,
        f"{TWO_WORKERS} {GAE}",
        f"{TWO_WORKERS} trainer.placement.ref_num_gpus_per_node=2",
        "generator.inference_engine.external_server_urls=grpc://h:1",
        "trainer.mode=one_step_off",
        "trainer.placement.colocate_all=false",
    ],
)
def test_a_run_of_a_written_configuration_is_the_run_that_wrote_it(argv: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(check(*argv.split(" ")).to_yaml())
    assert check(f"@{file}") == check(*argv.split(" "))


@pytest.mark.parametrize(
    "argv", ["generator.inference_engine.external_server_urls=grpc://h:1", "trainer.mode=one_step_off", TWO_WORKERS]
)
def test_what_a_written_configuration_left_unset_follows_the_arguments_after_it(argv: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(check().to_yaml())
    assert check(f"@{file}", argv) == check(argv)


def test_what_was_set_stays_set_in_a_written_configuration(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(check("trainer.placement.colocate_all=true").to_yaml())
    with pytest.raises(ConfigError, match=r"trainer\.placement\.colocate_all=true does not go with"):
        check(f"@{file}", "trainer.mode=one_step_off")


def test_both_sides_may_have_other_positions_than_the_checkpoint_says() -> None:
    both = ("trainer.policy.model_config_kwargs", "generator.inference_engine.engine_init_kwargs.hf_overrides")
    check(*(f"{side}.rope_parameters={{rope_type: yarn, factor: 2}}" for side in both))


def test_sizes_of_shards_are_checked_where_they_are_read() -> None:
    check("trainer.ref.fsdp_config.fsdp_size=3", "trainer.algorithm.use_kl_loss=false")
    four = "trainer.placement.policy_num_gpus_per_node=4"
    check("trainer.policy.fsdp_config.fsdp_size=2", "trainer.ref.fsdp_config.fsdp_size=4", four)


def test_old_logprobs_of_a_truncated_distribution_are_refused() -> None:
    with pytest.raises(ConfigError, match="set it to recompute"):
        check("trainer.algorithm.old_logprobs=rollout", "generator.sampling_params.top_p=0.9")
    check("trainer.algorithm.old_logprobs=rollout")
