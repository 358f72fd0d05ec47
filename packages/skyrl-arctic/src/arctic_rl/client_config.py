"""What the DeepSpeed workers and the rollout server are started with, derived from the shared keys of one run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class ArcticRLClientConfig:
    """ds_config: the DeepSpeed engine's own dictionary. ds_worker_config: the model in a worker. vllm_config: the
    rollout server. training_config: batch sizes and the schedule. training_gpus and sampling_gpus count devices (worker
    processes without a GPU)."""

    training_gpus: int
    sampling_gpus: int
    colocate: bool
    ds_config: dict[str, Any]
    ds_worker_config: dict[str, Any]
    vllm_config: dict[str, Any]
    training_config: dict[str, Any]


def build_rl_config(cfg: Any, *, device: Device | None = None, world_size: int | None = None) -> ArcticRLClientConfig:
    """Every setting that a shared key decides. Unset, `device` and `world_size` are what `trainer.device` and
    `trainer.placement` mean on this machine; a worker says where it is.

    ValueError for a configuration without `trainer.arctic_rl`, and for settings that DeepSpeed cannot combine.
    """
    arctic = getattr(cfg.trainer, "arctic_rl", None)
    if arctic is None:
        raise ValueError(
            f"{type(cfg).__name__} has no trainer.arctic_rl: parse it with arctic_rl.config.ArcticSkyRLConfig, "
            "or run an entrypoint with trainer.backend=arctic_rl"
        )
    place, engine = cfg.trainer.placement, cfg.generator.inference_engine
    where = device or resolve_device(cfg.trainer.device)
    workers = world_size or place.policy_num_nodes * place.policy_num_gpus_per_node
    return ArcticRLClientConfig(
        training_gpus=workers,
        sampling_gpus=engine.num_servers * engine.gpus_per_server,
        colocate=arctic.colocate or place.colocate_all,
        ds_config=ds_config(cfg, where, workers),
        ds_worker_config=ds_worker_config(cfg, where),
        vllm_config=vllm_config(cfg, where),
        training_config=training_config(cfg),
    )


def of_the_critic(cfg: Any) -> Any:
    """The configuration with the critic's own sections where the policy's are: what is derived from it is the critic's.

    ValueError where the critic's warm-up has two values.
    """
    trainer, critic = cfg.trainer, cfg.trainer.critic
    ratio, steps = trainer.arctic_rl.lr_warmup_ratio, critic.optimizer_config.num_warmup_steps
    if ratio is not None and steps:
        raise ValueError(
            f"trainer.arctic_rl.lr_warmup_ratio={ratio}, which holds for policy and critic, and "
            f"trainer.critic.optimizer_config.num_warmup_steps={steps} are two names of one setting: set one of them"
        )
    own = {"policy": critic, "policy_mini_batch_size": trainer.critic_mini_batch_size}
    return cfg.model_copy(update={"trainer": trainer.model_copy(update=own)})


def resolve_device(name: str) -> Device:
    """`trainer.device`; auto is cuda where torch finds a GPU."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return "cuda" if name == "cuda" else "cpu"


def compute_dtype(cfg: Any, device: Device) -> torch.dtype:
    """The dtype of the forward pass. On CPU float32, whatever `trainer.bf16` says: bfloat16 is emulated there.

    A `model_config_kwargs.dtype` other than float32 is taken as it is.
    """
    own = cfg.trainer.policy.model_config_kwargs
    if (name := own.get("dtype", own.get("torch_dtype"))) is not None and name != "float32":
        return getattr(torch, str(name), torch.float32)
    mixed = cfg.trainer.policy.fsdp_config.mixed_precision
    if mixed is not None and mixed.param_dtype == "fp16":
        raise ValueError(
            "trainer.policy.fsdp_config.mixed_precision.param_dtype=fp16 is not supported by "
            "trainer.backend=arctic_rl: use bf16 or fp32"
        )
    wanted = mixed.param_dtype == "bf16" if mixed is not None else cfg.trainer.bf16
    return torch.bfloat16 if wanted and device == "cuda" else torch.float32


def ds_config(cfg: Any, device: Device, world_size: int) -> dict[str, Any]:
    """The DeepSpeed engine's dictionary: one accumulation step, whose end is `step()` and nothing else."""
    arctic, optimizer = cfg.trainer.arctic_rl, cfg.trainer.policy.optimizer_config
    micro = cfg.trainer.micro_train_batch_size_per_gpu
    dtype = compute_dtype(cfg, device)
    stage = zero_stage(cfg, dtype)
    if dtype == torch.float64 and stage > 0:
        raise ValueError(
            f"model_config_kwargs.dtype=float64 needs trainer.arctic_rl.zero_stage=0, got {stage}: from stage 1 on "
            "DeepSpeed keeps weights and gradients of the optimizer in float32"
        )
    out: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": 1,
        "train_batch_size": micro * world_size,
        # stage 0 has no gradient norm and no skipped steps of its own: the backend reduces, checks and clips there
        "managed_gradient_accumulation": stage == 0,
        "gradient_clipping": 0.0 if stage == 0 else optimizer.max_grad_norm,
        "zero_optimization": _zero(arctic, stage),
        # the optimizer is torch's own, built by the worker: DeepSpeed's would compile C++ at first use
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }
    if arctic.torch_autocast_enabled:
        out["torch_autocast"] = {"enabled": True, "dtype": arctic.torch_autocast_dtype or "bfloat16"}
    elif dtype == torch.bfloat16:
        mixed = cfg.trainer.policy.fsdp_config.mixed_precision
        out["bf16"] = {"enabled": True, "check_grad_overflow": True}
        out["data_types"] = {"grad_accum_dtype": "fp32"}
        out["communication_data_type"] = mixed.reduce_dtype if mixed is not None else "fp32"
    return out


def zero_stage(cfg: Any, dtype: torch.dtype) -> int:
    """`zero_stage`, at least 1 with bfloat16 weights: at stage 0 DeepSpeed would add up gradients in bfloat16."""
    arctic = cfg.trainer.arctic_rl
    low_precision = dtype == torch.bfloat16 and not arctic.torch_autocast_enabled
    return max(arctic.zero_stage, 1) if low_precision else arctic.zero_stage


def _zero(arctic: Any, stage: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if stage in (1, 2):
        # grads of one step arrive in several backward passes; overlapping their reduction needs a managed boundary
        zero["overlap_comm"] = False
    if stage == 3:
        zero["overlap_comm"] = False
        zero["stage3_gather_16bit_weights_on_model_save"] = False
    if arctic.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if arctic.offload_param:
        zero["offload_param"] = {"device": "cpu"}
    return zero


def ds_worker_config(cfg: Any, device: Device) -> dict[str, Any]:
    """The model in a worker: where it is loaded from, how it computes, and the size of a block of logits."""
    arctic, policy = cfg.trainer.arctic_rl, cfg.trainer.policy
    return {
        "model_path": policy.model.path,
        "model_config_kwargs": dict(policy.model_config_kwargs),
        "compute_dtype": compute_dtype(cfg, device),
        "attn_implementation": attention(cfg, device),
        "enable_gradient_checkpointing": cfg.trainer.gradient_checkpointing,
        "logits_optimization": arctic.logits_optimization or "none",
        "peak_logits_gib": arctic.logits_optimization_peak_mem_size_in_gib,
        "determinism_seed": arctic.determinism_seed if arctic.determinism_full else None,
    }


def attention(cfg: Any, device: Device) -> str | None:
    """The attention that transformers is asked for. Flash kernels need a GPU: on CPU they become torch's own (sdpa).

    None leaves the choice to the core, which reads `trainer.flash_attn`.
    """
    asked = cfg.trainer.arctic_rl.attn_implementation
    if asked is not None and device == "cpu" and asked.startswith("flash"):
        return "sdpa"
    return asked


def vllm_config(cfg: Any, device: Device) -> dict[str, Any]:
    """The rollout server: the engine's arguments as the shared keys give them."""
    engine = cfg.generator.inference_engine
    length = cfg.trainer.max_prompt_length + cfg.generator.sampling_params.max_generate_length
    return {
        "backend": engine.backend,
        "model": cfg.trainer.policy.model.path,
        "num_engines": engine.num_engines,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "dtype": ("float32" if device == "cpu" else "bfloat16") if engine.model_dtype == "auto" else engine.model_dtype,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "enforce_eager": engine.enforce_eager,
        "enable_prefix_caching": engine.enable_prefix_caching,
        "max_model_len": length if cfg.generator.max_turns == 1 else None,
        **engine.engine_init_kwargs,
    }


def training_config(cfg: Any) -> dict[str, Any]:
    """Batch sizes in sequences per optimizer step and per micro-batch, and the schedule."""
    trainer, n = cfg.trainer, cfg.generator.n_samples_per_prompt
    ratio = trainer.arctic_rl.lr_warmup_ratio
    optimizer = trainer.policy.optimizer_config
    steps = optimizer.num_warmup_steps
    if ratio is not None and steps:
        raise ValueError(
            f"trainer.arctic_rl.lr_warmup_ratio={ratio} and trainer.policy.optimizer_config.num_warmup_steps={steps} "
            "are two names of one setting: set one of them"
        )
    return {
        "train_batch_size": trainer.train_batch_size * n,
        "mini_batch_size": trainer.policy_mini_batch_size * n,
        "micro_batch_size_per_gpu": trainer.micro_train_batch_size_per_gpu,
        "update_epochs_per_batch": trainer.update_epochs_per_batch,
        "seed": trainer.seed,
        "optimizer": {
            "type": "AdamW",
            "lr": optimizer.lr,
            "betas": optimizer.adam_betas,
            "weight_decay": optimizer.weight_decay,
            "max_grad_norm": optimizer.max_grad_norm,
        },
        "scheduler": optimizer.scheduler,
        "num_warmup_steps": steps,
        "lr_warmup_ratio": ratio,
    }


def warmup_steps(training: dict[str, Any], total_steps: int) -> int:
    """Optimizer steps of warm-up: the ratio's share of all steps (rounded up), else the number that is set."""
    ratio = training["lr_warmup_ratio"]
    return training["num_warmup_steps"] if ratio is None else int(-(-ratio * total_steps // 1))
