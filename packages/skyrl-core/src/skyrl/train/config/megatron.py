"""What a recipe for Megatron sets (`*.megatron_config`, `trainer.mtp`, int4 training): typed here, decided by nothing.

No Megatron engine is part of this project. A recipe keeps these keys and runs on a backend that needs none of them;
`inert.py` lists them and `absent.py` refuses those that would change what is trained.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from skyrl.train.config.part import ConfigPart, key, section

OPTIMIZER = {
    "overlap_cpu_optimizer_d2h_h2d": False,
    "use_precision_aware_optimizer": False,
    "optimizer_cpu_offload": False,
    "optimizer_offload_fraction": 0.0,
}
TRANSFORMER = {
    "recompute_granularity": "full",
    "recompute_modules": ["core_attn"],
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "gradient_accumulation_fusion": False,
}


class MegatronDDPConfig(ConfigPart):
    """`*.megatron_config.ddp_config.*`."""

    grad_reduce_in_fp32: bool = key(True, "Megatron: reduce gradients in float32.")
    overlap_grad_reduce: bool = key(False, "Megatron: reduce gradients during the backward pass.")
    overlap_param_gather: bool = key(False, "Megatron: gather parameters during the forward pass.")
    average_in_collective: bool = key(True, "Megatron: average inside the collective.")


class MegatronExportConfig(ConfigPart):
    """`*.megatron_config.hf_export_config.*`."""

    distributed_save: bool = key(False, "Megatron: several ranks write one export.")
    save_every_n_ranks: int = key(1, "Megatron: one writer among so many ranks.", ge=1)


class MegatronLoraConfig(ConfigPart):
    """`*.megatron_config.lora_config.*`."""

    lora_type: str = key("lora", "Megatron: variant of adapters.")
    merge_lora: bool = key(True, "Megatron: publish merged weights instead of adapters.")


class MegatronConfig(ConfigPart):
    """`trainer.policy.megatron_config.*` and `trainer.ref.megatron_config.*`."""

    tensor_model_parallel_size: int = key(1, "Megatron: GPUs per layer.", ge=1)
    pipeline_model_parallel_size: int = key(1, "Megatron: stages of layers.", ge=1)
    context_parallel_size: int = key(1, "Megatron: GPUs per sequence.", ge=1)
    expert_model_parallel_size: int = key(1, "Megatron: GPUs that share the experts.", ge=1)
    expert_tensor_parallel_size: int | None = key(None, "Megatron: GPUs per expert.", ge=1)
    moe_token_dispatcher_type: str = key("alltoall", "Megatron: how tokens reach experts.")
    moe_router_load_balancing_type: str = key("none", "Megatron: load balancing of experts.")
    moe_aux_loss_coeff: float = key(0.0, "Megatron: coefficient of the balancing loss.")
    moe_grouped_gemm: bool = key(True, "Megatron: one kernel for all experts.")
    moe_router_score_function: str | None = key(None, "Megatron: the router's function.")
    moe_router_enable_expert_bias: bool | None = key(None, "Megatron: a bias per expert.")
    moe_enable_routing_replay: bool = key(False, "Megatron: train along the experts that the server took.")
    moe_per_layer_logging: bool = key(False, "Megatron: a metric per layer.")
    moe_router_dtype: str = key("fp32", "Megatron: dtype of the router.")
    ddp_config: MegatronDDPConfig = section(MegatronDDPConfig)
    hf_export_config: MegatronExportConfig = section(MegatronExportConfig)
    lora_config: MegatronLoraConfig = section(MegatronLoraConfig)
    optimizer_config_kwargs: dict[str, Any] = Field(
        default_factory=lambda: dict(OPTIMIZER), description="Megatron: further optimizer settings."
    )
    transformer_config_kwargs: dict[str, Any] = Field(
        default_factory=lambda: dict(TRANSFORMER), description="Megatron: further model settings."
    )
    empty_cuda_cache: bool | None = key(True, "Megatron: empty the allocator's cache between phases.")
    model_config_kwargs: dict[str, Any] = key({}, "Megatron: overrides of the model's configuration.")
    dist_ckpt_optim_fully_reshardable: bool = key(False, "Megatron: checkpoints for any number of ranks.")
    freeze_moe_router: bool = key(False, "Megatron: leave the router untrained.")
    mtp_num_layers: int | None = key(None, "Megatron: layers of multi-token prediction.", ge=0)
    mtp_loss_weight: float = key(0.1, "Megatron: weight of its loss.")
    mtp_loss_chunk_size: int | None = key(1024, "Megatron: positions of its loss at once.")
    mtp_loss_topk: int | None = key(None, "Megatron: tokens per position of its loss.")
    async_dist_ckpt_save: bool = key(False, "Megatron: write checkpoints in the background.")
    async_dist_ckpt_strategy: str = key("mcore", "Megatron: who writes them.")
    async_save_prestage_to_cpu: bool = key(False, "Megatron: copy to host memory first.")


class MtpConfig(ConfigPart):
    """`trainer.mtp.*`: multi-token prediction."""

    enabled: bool = key(False, "Train a head that predicts several tokens; only false is possible here.")
    num_speculative_tokens: int = key(1, "Tokens that the server drafts with it.", ge=1)
    loss_weight: float = key(0.1, "Weight of its loss.")


class FakeInt4QatConfig(ConfigPart):
    """`trainer.policy.model.fake_int4_qat.*`: training on weights rounded to int4."""

    enabled: bool = key(False, "Round weights in the forward pass; only false is possible here.")
    group_size: int = key(32, "Weights per scale.", ge=1)
    symmetric: bool = key(True, "No zero point.")
    scale_divisor: float = key(7.5, "Largest weight over this is the scale.")
    q_min: float = key(-8.0, "Least quantised value.")
    bf16_base_path: str | None = key(None, "Checkpoint in full precision.")
