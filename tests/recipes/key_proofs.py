"""For each key of a public recipe, the test that shows what it changes."""

from __future__ import annotations

from collections.abc import Mapping

from skyrl.train.policy.fsdp.plugin import IN_HOST_MEMORY

CORE, ARCTIC = "packages/skyrl-core/tests/", "packages/skyrl-arctic/tests/"
ADAPTERS = "packages/skyrl-core/src/skyrl/train/policy/lora_suite.py"
OWN_KEYS = f"{ARCTIC}test_config.py::test_a_key_with_a_shared_name_sets_the_shared_key"
LISTED = f"{ARCTIC}test_config.py::test_each_key_is_listed_under_what_becomes_of_it"
NEEDED = f"{ARCTIC}test_config.py::test_every_shared_key_that_deepspeed_needs_arrives_there"
GROUP, VALUE = f"{CORE}test_policy_group.py", f"{CORE}test_value_model.py"
BATCHES = f"{CORE}test_key_effects.py::test_a_step_has_the_batches_that_are_asked_for"
INTERVALS = f"{CORE}test_key_effects.py::test_what_a_run_leaves_follows_its_intervals"
EARLIER = f"{CORE}test_known_keys.py::test_names_of_earlier_versions_are_renamed"
OLDER_RATIO = f"{CORE}test_known_keys.py::test_the_older_form_of_a_token_level_ratio_becomes_the_newer_one"
RULES = f"{CORE}test_validation.py::test_a_broken_rule_names_the_keys_and_what_to_do"
SIMULATED = f"{CORE}test_modes.py::test_a_simulated_run_publishes_weights_that_do_not_change"
AHEAD = f"{CORE}test_modes.py::test_groups_are_made_ahead_up_to_the_bound_and_each_prompt_is_trained_on_once"
STEP_WISE = f"{CORE}test_step_wise.py::test_a_run_trains_on_turns_and_merged_it_is_the_run_on_episodes_bit_for_bit"

# Key -> why a machine without GPUs cannot show what it changes. The report at start lists it there as unused.
SHOWN_BY_A_GPU: Mapping[str, str] = {
    f"trainer.{role}.fsdp_config.cpu_offload": IN_HOST_MEMORY for role in ("policy", "ref")
}

# Key, or the section of a free mapping -> test. Keys of `key_effects.EFFECTS` and of the algorithm's table are there.
PROOFS: Mapping[str, str] = {
    "data.train_data": f"{CORE}test_prompts.py::test_rows_of_several_files_are_numbered_through",
    "data.val_data": INTERVALS,
    "environment.env_class": f"{CORE}test_prompts.py::test_a_rows_own_environment_goes_before_the_configured_one",
    "environment.skyrl_gym.llm_as_a_judge.model": f"{CORE}test_key_effects.py::"
    "test_an_environment_of_ones_own_gets_the_section_of_its_name",
    "environment.skyrl_gym.max_env_workers": f"{CORE}test_environments.py::"
    "test_at_most_so_many_calls_run_at_once_and_waiting_for_a_thread_is_not_held_against_a_call",
    "generator.append_eos_token_after_stop_str_in_multi_turn": f"{CORE}test_turn_ends.py::"
    "test_a_stop_string_ends_the_turn_with_its_last_token_and_then_follows",
    "generator.use_conversation_multi_turn": f"{CORE}test_turn_ends.py::"
    "test_a_stop_string_ends_the_turn_with_its_last_token_and_then_follows",
    "generator.apply_overlong_filtering": f"{CORE}test_env_generator.py::"
    "test_a_rollout_cut_off_at_its_length_loses_its_reward_or_its_place_in_the_loss",
    "generator.eval_n_samples_per_prompt": INTERVALS,
    "generator.max_input_length": f"{CORE}test_env_generator.py::"
    "test_a_context_that_is_full_ends_the_episode_before_the_observation",
    "generator.max_turns": f"{CORE}test_env_generator.py::"
    "test_the_public_multi_turn_environment_runs_and_is_scored_per_turn",
    "generator.merge_stepwise_output": STEP_WISE,
    "generator.step_wise_trajectories": STEP_WISE,
    "generator.n_samples_per_prompt": BATCHES,
    "generator.inference_engine.async_engine": EARLIER,
    "generator.inference_engine.distributed_executor_backend": RULES,
    "generator.inference_engine.external_proxy_url": f"{CORE}test_known_keys.py::"
    "test_a_key_with_a_successor_says_what_to_write",
    "generator.inference_engine.external_server_urls": f"{CORE}test_validation.py::"
    "test_urls_imply_that_nothing_is_started_or_shared",
    "generator.inference_engine.run_engines_locally": RULES,
    "generator.inference_engine.language_model_only": f"{CORE}test_key_effects.py::"
    "test_both_sides_hold_the_same_part_of_a_model",
    "trainer.ckpt_interval": INTERVALS,
    "trainer.hf_save_interval": INTERVALS,
    "trainer.max_ckpts_to_keep": INTERVALS,
    "trainer.eval_before_train": INTERVALS,
    "trainer.eval_interval": INTERVALS,
    "trainer.dump_data_batch": INTERVALS,
    "trainer.dump_eval_results": INTERVALS,
    "trainer.critic.model.path": "tests/seam/test_ppo.py::test_every_key_of_ppo_changes_the_run",
    "trainer.critic_mini_batch_size": "tests/seam/test_ppo.py::test_every_key_of_ppo_changes_the_run",
    "trainer.critic.optimizer_config.lr": f"{VALUE}::test_settings_of_the_critics_optimizer_reach_it",
    "trainer.policy.model.lora.rank": f"{ADAPTERS}::test_the_base_never_changes_and_the_adapter_does",
    "trainer.policy.model.lora.alpha": f"{ADAPTERS}::test_gradients_of_the_adapter_equal_the_plain_reference",
    "trainer.policy.model.lora.init_method": f"{CORE}test_lora.py::"
    "test_each_way_of_drawing_begins_with_other_factors_and_the_same_policy",
    "trainer.critic.model.lora": f"{CORE}test_lora.py::"
    "test_a_critic_with_an_adapter_trains_it_and_its_head_and_nothing_else",
    "trainer.flash_attn": f"{CORE}test_backends.py::test_the_usual_flags_of_a_recipe_are_each_accounted_for",
    "trainer.strategy": EARLIER,
    "trainer.fully_async.enabled": AHEAD,
    "trainer.fully_async.max_staleness_steps": AHEAD,
    "trainer.fully_async.num_parallel_generation_workers": f"{CORE}test_staleness.py::"
    "test_as_many_groups_are_begun_as_the_bound_and_the_workers_allow",
    "trainer.fully_async.clear_kv_cache_on_weight_sync": f"{CORE}test_mode_rules.py::"
    "test_what_a_mode_leaves_out_is_listed",
    "trainer.fully_async.simulate_training": SIMULATED,
    "trainer.fully_async.simulate_training_step_seconds": SIMULATED,
    "trainer.fully_async.simulate_weight_sync_seconds": SIMULATED,
    "trainer.logger": f"{CORE}test_trackers.py::test_several_trackers_get_the_same_step",
    "trainer.max_prompt_length": f"{CORE}test_prompts.py::"
    "test_a_prompt_that_is_too_long_is_left_out_and_counted_and_keeps_its_number_free",
    "trainer.override_entrypoint": f"{CORE}test_public_names.py::"
    "test_dapos_own_defaults_hold_through_its_name_only_and_under_the_users_keys",
    "trainer.placement.reward_num_nodes": "tests/recipes/test_recipes.py::"
    "test_a_recipe_is_accepted_or_refused_with_the_message_of_the_table",
    "trainer.policy.model.path": f"{CORE}test_validation.py::test_what_is_unset_follows_the_key_that_it_belongs_to",
    "trainer.ref.model.path": f"{CORE}test_validation.py::test_what_is_unset_follows_the_key_that_it_belongs_to",
    "trainer.policy.fsdp_config.fsdp_size": f"{CORE}test_ray_group.py::"
    "test_ranks_share_one_copy_of_the_weights_or_have_one_each",
    **{
        f"trainer.{role}.fsdp_config.wrap_policy": f"{CORE}test_key_effects.py::"
        "test_the_layers_of_the_named_class_are_sharded_one_by_one"
        for role in ("policy", "ref")
    },
    "trainer.policy.fsdp_config.reshard_after_forward": f"{CORE}test_key_effects.py::"
    "test_gathered_weights_are_freed_after_the_forward_pass_or_kept",
    "trainer.policy.optimizer_config.lr": f"{GROUP}::test_settings_of_the_optimizer_reach_it",
    "trainer.policy.optimizer_config.max_grad_norm": f"{GROUP}::test_settings_of_the_optimizer_reach_it",
    "trainer.policy.optimizer_config.num_warmup_steps": f"{GROUP}::test_settings_of_the_optimizer_reach_it",
    "trainer.policy.optimizer_config.weight_decay": f"{GROUP}::test_settings_of_the_optimizer_reach_it",
    "trainer.policy.optimizer_config.offload_after_step": f"{ARCTIC}test_schedules.py::"
    "test_offloading_between_steps_is_listed_as_unused",
    "trainer.train_batch_size": BATCHES,
    "trainer.policy_mini_batch_size": BATCHES,
    "trainer.update_epochs_per_batch": BATCHES,
    "trainer.resume_mode": f"{CORE}test_checkpoints.py::test_resume_modes",
    "trainer.seed": f"{CORE}test_loader.py::test_each_epoch_and_each_seed_has_an_order_of_its_own",
    "trainer.use_sample_packing": EARLIER,
    "trainer.algorithm.use_tis": OLDER_RATIO,
    "trainer.algorithm.tis_imp_ratio_cap": OLDER_RATIO,
    "trainer.algorithm.value_clip": "tests/seam/test_ppo.py::test_every_key_of_ppo_changes_the_run",
    "trainer.arctic_rl.zero_stage": NEEDED,
    "trainer.arctic_rl.offload_optimizer": NEEDED,
    "trainer.arctic_rl.lr_warmup_ratio": f"{ARCTIC}test_config.py::test_warm_up_by_ratio_and_by_steps_is_refused",
    "trainer.arctic_rl.log_prob_gpus": f"{ARCTIC}test_config.py::"
    "test_a_value_that_cannot_be_honoured_is_an_error_that_says_what_to_do",
    **{
        f"trainer.arctic_rl.{name}": OWN_KEYS
        for name in (
            "optimizer_betas", "vllm_enforce_eager", "vllm_max_num_batched_tokens", "startup_timeout",
            "speculative_model", "num_speculative_tokens",
        )
    },
    **{
        f"trainer.arctic_rl.{name}": LISTED
        for name in (
            "colocate", "attn_implementation", "cuda_ipc_weight_sync", "low_memory_weight_sync", "server_logs",
        )
    },
}  # fmt: skip
