"""A recipe made small: only the keys of one table change, so that two real steps take about a second on a CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

# Key -> its value in a shrunk run. Everything else stays as the recipe has it.
SIZES: Mapping[str, str] = {
    # batches and workers
    "trainer.train_batch_size": "2",
    "trainer.policy_mini_batch_size": "2",
    "trainer.critic_mini_batch_size": "2",
    "trainer.micro_train_batch_size_per_gpu": "4",
    "trainer.micro_forward_batch_size_per_gpu": "4",
    "generator.n_samples_per_prompt": "2",
    "generator.eval_n_samples_per_prompt": "1",
    "trainer.placement.policy_num_nodes": "1",
    "trainer.placement.policy_num_gpus_per_node": "1",
    "trainer.placement.ref_num_nodes": "1",
    "trainer.placement.ref_num_gpus_per_node": "1",
    "trainer.placement.critic_num_nodes": "1",
    "trainer.placement.critic_num_gpus_per_node": "1",
    "trainer.fully_async.num_parallel_generation_workers": "2",
    "trainer.policy.fsdp_config.fsdp_size": "1",
    # lengths
    "trainer.max_prompt_length": "16",
    "generator.max_input_length": "48",
    "generator.sampling_params.max_generate_length": "8",
    "generator.eval_sampling_params.max_generate_length": "4",
    "trainer.algorithm.overlong_buffer_len": "4",
    # steps
    "trainer.fully_async.simulate_training_step_seconds": "0.01",
    "trainer.max_training_steps": "2",
    "trainer.ckpt_interval": "2",
    "trainer.hf_save_interval": "0",
    # what is loaded, and where results go
    "trainer.policy.model.path": "{model}",
    "trainer.ref.model.path": "{model}",
    "trainer.critic.model.path": "{model}",
    "data.train_data": "{data}",
    "data.val_data": "{data}",
    "trainer.ckpt_path": "{folder}/ckpts",
    "trainer.export_path": "{folder}/exports",
    "trainer.log_path": "{folder}/logs",
    "trainer.logger": "jsonl",
    "trainer.device": "cpu",
    "trainer.progress": "false",
    # servers: one reference server, which all runs share
    "generator.inference_engine.external_server_urls": "{url}",
    "generator.inference_engine.run_engines_locally": "false",
    "trainer.placement.colocate_all": "false",
}
# Keys that are given only where the recipe gives them: elsewhere the default fits, or follows.
IF_GIVEN = frozenset(
    {
        "generator.max_input_length",
        "trainer.algorithm.overlong_buffer_len",
        "trainer.critic.model.path",
        "trainer.fully_async.num_parallel_generation_workers",
        "trainer.fully_async.simulate_training_step_seconds",
        "trainer.placement.critic_num_gpus_per_node",
        "trainer.placement.critic_num_nodes",
        "trainer.placement.ref_num_gpus_per_node",
        "trainer.placement.ref_num_nodes",
        "trainer.policy.fsdp_config.fsdp_size",
        "trainer.ref.model.path",
    }
)


def shrunk(argv: Sequence[str], places: Mapping[str, str | Path]) -> list[str]:
    """The arguments with the sizes after them. `places`: model, data, folder and url."""
    given = {argument.partition("=")[0]: argument.partition("=")[2] for argument in argv}
    out = list(argv)
    for key, value in SIZES.items():
        if key in IF_GIVEN and given.get(key, "null") in ("null", "0"):
            continue
        if key == "generator.max_input_length" and given.get("generator.max_turns", "1") == "1":
            value = SIZES["trainer.max_prompt_length"]
        out.append(f"{key}={value.format_map({name: str(place) for name, place in places.items()})}")
    return out
