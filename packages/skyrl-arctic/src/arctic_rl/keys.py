"""The integration's own keys (`trainer.arctic_rl.*`): the 39 public names, their defaults and what each does here.

A key whose unset value is None follows the shared key that its description names. What becomes of each key that a user
sets is listed at start by `key_report.py`; a value that cannot be honoured is refused there or here, never dropped.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator
from skyrl.train.config import ConfigPart, key
from skyrl.train.config.part import FloatPair


class ArcticRLTrainerConfig(ConfigPart):
    """`trainer.arctic_rl.*`."""

    # Sharding and memory
    zero_stage: Literal[0, 1, 2, 3] = key(0, "DeepSpeed ZeRO stage; bf16 at stage 0 runs as stage 1.")
    offload_optimizer: bool = key(False, "Keep optimizer state in host memory; needs zero_stage of at least 1.")
    offload_param: bool = key(False, "Keep parameter shards in host memory; needs zero_stage=3.")
    enable_gradient_checkpointing: bool | None = key(None, "Unset: trainer.gradient_checkpointing.")
    colocate: bool = key(False, "Policy and rollout server take turns on the same devices.")
    log_prob_gpus: int = key(0, "Devices that compute logprobs only; here the policy's workers do it.", ge=0)
    ulysses_sequence_parallel_size: int = key(1, "Devices that share one sequence.", ge=1)

    # Model and kernels
    attn_implementation: str | None = key(None, "Attention of transformers (sdpa, eager, ...); unset: by device.")
    use_liger: bool = key(False, "Fused liger kernels.", theirs=True, reason="liger kernels run on a GPU only")
    use_zorro: bool = key(
        False,
        "Compute the prompt of a group once.",
        theirs=True,
        reason="same gradients either way; groups need not fill micro-batches without it",
    )
    logits_optimization: Literal["memory", "none"] | None = key(
        "memory",
        "memory: logprobs a block of positions at a time; none: all positions at once.",
    )
    logits_optimization_peak_mem_size_in_gib: float = key(
        4.0, "Float32 logits of one block take at most this much memory.", gt=0
    )
    logits_compute_from_fp32_inputs: bool = key(False, "Hidden states in float32 before the LM head.")
    logits_compute_in_fp32: bool = key(False, "The LM head in float32.")
    torch_autocast_enabled: bool = key(False, "Float32 weights with autocast instead of low-precision weights.")
    torch_autocast_dtype: Literal["bfloat16", "float16"] | None = key(None, "Dtype of autocast; unset: bfloat16.")
    determinism_full: bool = key(False, "Only deterministic kernels; an operation without one is an error.")
    determinism_seed: int = key(42, "Seeds the workers' generators if determinism_full is set.", ge=0)

    # Optimizer and schedule
    optimizer_betas: FloatPair | None = key(None, "Unset: trainer.policy.optimizer_config.adam_betas.")
    lr_scheduler_type: str | None = key(None, "Unset: trainer.policy.optimizer_config.scheduler.")
    lr_warmup_ratio: float | None = key(
        None,
        "Share of all optimizer steps that warm up; unset: trainer.policy.optimizer_config.num_warmup_steps.",
        ge=0,
        le=1,
    )

    # Weights to the server
    cuda_ipc_weight_sync: bool = key(False, "Weights go through the rollout protocol instead.")
    low_memory_weight_sync: bool = key(False, "Weights are always streamed tensor by tensor.")
    drop_position_ids: bool = key(True, "Positions are always derived from the sequence lengths.")

    # The rollout server
    vllm_max_num_seqs: int | None = key(None, "Unset: generator.inference_engine.max_num_seqs.", ge=1)
    vllm_enforce_eager: bool | None = key(None, "Unset: generator.inference_engine.enforce_eager.")
    vllm_enable_chunked_prefill: bool | None = key(None, "Becomes engine_init_kwargs.enable_chunked_prefill.")
    vllm_enable_prefix_caching: bool | None = key(None, "Unset: generator.inference_engine.enable_prefix_caching.")
    vllm_max_model_len: int | None = key(None, "Becomes engine_init_kwargs.max_model_len.", ge=1)
    vllm_max_num_batched_tokens: int | None = key(
        None, "Unset: generator.inference_engine.max_num_batched_tokens.", ge=1
    )
    vllm_config: dict[str, Any] | None = key(None, "Merged into generator.inference_engine.engine_init_kwargs.")
    use_arctic_inference: bool = key(
        False,
        "ArcticInference features of the server.",
        theirs=True,
        reason="they are switched on at the server, which says what it can do",
    )
    arctic_inference_config: dict[str, Any] | None = key(None, "Settings of these features.")
    speculative_model: str | None = key(None, "Draft model of the server; empty: none.")
    num_speculative_tokens: int = key(3, "Tokens that the draft model proposes.", ge=1)
    host: str = key("localhost", "The server's address is generator.inference_engine.external_server_urls.")
    port: int = key(7000, "The server's address is generator.inference_engine.external_server_urls.", ge=1, le=65535)
    startup_timeout: float | None = key(
        None, "Seconds; unset: generator.inference_engine.server_start_timeout_s.", gt=0
    )
    server_logs: bool = key(False, "Server logs are always written to trainer.log_path.")

    @model_validator(mode="after")
    def _fits_together(self) -> ArcticRLTrainerConfig:
        if self.offload_optimizer and self.zero_stage < 1:
            raise ValueError(
                "trainer.arctic_rl.offload_optimizer=true needs trainer.arctic_rl.zero_stage of 1, 2 or 3, "
                f"got {self.zero_stage}: DeepSpeed offloads partitioned optimizer state only"
            )
        if self.offload_param and self.zero_stage != 3:
            raise ValueError(
                "trainer.arctic_rl.offload_param=true needs trainer.arctic_rl.zero_stage=3, "
                f"got {self.zero_stage}: only stage 3 partitions parameters"
            )
        if self.torch_autocast_dtype and not self.torch_autocast_enabled:
            raise ValueError(
                "trainer.arctic_rl.torch_autocast_dtype is set but torch_autocast_enabled is false: set it to true "
                "or leave the dtype out"
            )
        return self
