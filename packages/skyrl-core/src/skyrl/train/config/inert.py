"""Keys that decide nothing here, whatever their value, and why: one table, to be read through whenever a key is added.

A key stands here because its value cannot change what is trained. A value that would is refused by `absent.py`; a key
that another key's value leaves idle is in `idle.py`.
"""

from __future__ import annotations

import fnmatch

ENGINE = "generator.inference_engine."
NO_MEGATRON = "no Megatron engine is here; the backend shards the model its own way"
WHOLE_SEQUENCES = "a worker takes whole sequences; the numbers are the same"
ALLOCATOR = "a setting of the CUDA allocator; set PYTORCH_CUDA_ALLOC_CONF instead"
IN_MEMORY = "rows are in the trainer's memory"
ALWAYS_LOGPROBS = "the sampled token's logprob always comes"

# Pattern -> why it decides nothing.
INERT = {
    "trainer.*.megatron_config.*": NO_MEGATRON,
    "trainer.fused_lm_head_logprob*": NO_MEGATRON,
    "trainer.vocab_entropy_chunk_*": NO_MEGATRON,
    "trainer.*.model.fake_int4_qat.*": "no weights are rounded in training",
    "trainer.mtp.*": "no multi-token-prediction head is trained",
    "trainer.*.torch_profiler_config.*": "no profile is taken",
    "trainer.policy.inference_only_init": "a policy can always be trained",
    "trainer.*.sequence_parallel_size": WHOLE_SEQUENCES,
    "trainer.sequence_parallel_backend": WHOLE_SEQUENCES,
    "trainer.*.use_torch_compile": "the model runs uncompiled; the numbers are the same",
    "trainer.*.record_memory": "no memory snapshots are taken",
    "trainer.*.language_model_only": "the language part of a model is what is trained, always",
    "trainer.use_expandable_segments": ALLOCATOR,
    "trainer.recompute_old_logprobs_per_minibatch": "old logprobs are made in micro-batches; the numbers are the same",
    "trainer.remove_microbatch_padding": "sequences are flat: there is no padding to remove",
    "trainer.eval_batch_size": "the server queues all evaluation prompts itself",
    "trainer.enable_ray_gpu_monitor": "figures of the GPUs are not collected",
    "data.dataloader.num_workers": IN_MEMORY,
    "data.dataloader.persistent_workers": IN_MEMORY,
    "generator.use_cache_salt": "the server keys its cache by weight version, always",
    "generator.vision_language_generator": "prompts are text",
    f"{ENGINE}delta_weight_sync.*": "deltas travel through the rollout protocol, not over shared files",
    f"{ENGINE}weight_transfer_threshold_cuda_ipc_GB": "weights do not travel over CUDA IPC",
    f"{ENGINE}offload_kv_for_weight_sync": "a publish swaps weights in place and leaves the KV cache where it is",
    f"{ENGINE}vllm_v1_disable_multiproc": "it changes nothing in public SkyRL either",
    f"{ENGINE}enable_chunked_prefill": "it changes nothing in public SkyRL either",
    f"{ENGINE}enable_return_routed_experts": "the experts of a token are not returned",
    f"{ENGINE}enable_ray_prometheus_stats": "the server is not a Ray actor; it has an OpenMetrics port of its own",
    f"{ENGINE}use_expandable_segments": ALLOCATOR,
    f"{ENGINE}router_init_kwargs*": "the trainer balances over the servers itself",
    f"{ENGINE}served_model_name": "requests name no model",
    f"{ENGINE}enable_pd": "every server does both prefill and decode",
    f"{ENGINE}num_prefill": "every server does both prefill and decode",
}

# Pattern -> what every value of it comes to.
ALWAYS = {
    "generator.batched": "environments are stepped on exact tokens either way",
    "generator.sampling_params.logprobs": ALWAYS_LOGPROBS,
    "generator.eval_sampling_params.logprobs": ALWAYS_LOGPROBS,
}


def why_inert(dotted: str) -> str | None:
    """Why the key decides nothing, None where it does decide something."""
    return next((why for pattern, why in INERT.items() if fnmatch.fnmatchcase(dotted, pattern)), None)
