"""The trained model, its optimizer and its sharding (`trainer.policy.*`), the critic and the reference."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from skyrl.train.config.megatron import FakeInt4QatConfig, MegatronConfig
from skyrl.train.config.part import ConfigPart, FloatPair, TextOrTexts, key, section
from skyrl.train.config.profiling import TorchProfilerConfig

Precision = Literal["fp32", "bf16", "fp16"]


class LoraConfig(ConfigPart):
    """`trainer.policy.model.lora.*`, `trainer.critic.model.lora.*`: a low-rank adapter (arXiv 2106.09685) that is
    trained instead of the weights."""

    rank: int = key(0, "Rank of the adapter; 0: LoRA is off and every weight is trained.", ge=0)
    alpha: int = key(16, "The adapter's part is scaled by alpha / rank.", ge=1)
    dropout: float = key(0.0, "Share of the adapter's inputs that a training pass leaves out.", ge=0, lt=1)
    target_modules: TextOrTexts = key(
        "all-linear",
        "Which modules get one: all-linear (all linear layers but the head), a list of names' ends, or one regex.",
    )
    exclude_modules: TextOrTexts | None = key(
        None, "Which of them get none after all: a list of names' ends, or one regex."
    )
    init_method: str = key("kaiming", "How A begins: kaiming, gaussian or orthogonal; B begins so that B @ A is 0.")
    max_loras: int = key(1, "Adapters that a server which the run starts has room for.", ge=1)
    max_cpu_loras: int | None = key(None, "Adapters that such a server keeps in host memory; unset: the server's own.",
        ge=1)  # fmt: skip
    lora_sync_path: str = key("/tmp/skyrl_lora_sync", "Accepted, and unused: adapters travel through the seam.")


class ModelConfig(ConfigPart):
    """`trainer.policy.model.*`."""

    path: str = key(
        "Qwen/Qwen2.5-1.5B-Instruct",
        "Folder of a Hugging Face checkpoint, or its name on the hub.",
    )
    fake_int4_qat: FakeInt4QatConfig = section(FakeInt4QatConfig)
    lora: LoraConfig = section(LoraConfig)


class RefModelConfig(ConfigPart):
    """`trainer.ref.model.*`."""

    path: str | None = key(None, "The reference model; unset means trainer.policy.model.path.")
    fake_int4_qat: FakeInt4QatConfig = section(FakeInt4QatConfig)


class CriticModelConfig(ConfigPart):
    """`trainer.critic.model.*`."""

    path: str | None = key(
        None,
        "The model whose trunk the critic starts from, with or without a value head; unset: there is no critic.",
    )
    lora: LoraConfig = section(LoraConfig)
    fake_int4_qat: FakeInt4QatConfig = section(FakeInt4QatConfig)


class OptimizerConfig(ConfigPart):
    """AdamW and its schedule (`trainer.policy.optimizer_config.*`, `trainer.critic.optimizer_config.*`)."""

    lr: float = key(1e-6, "Peak learning rate.", ge=0)
    adam_betas: FloatPair = Field((0.9, 0.999), description="Decay of the two moments.")
    weight_decay: float = key(1e-2, "Decoupled weight decay.", ge=0)
    max_grad_norm: float = key(1.0, "Gradients are clipped to this global norm.", gt=0)
    offload_after_step: bool = key(
        True,
        "Move optimizer state off the accelerator between steps when it is shared.",
    )
    num_warmup_steps: int = key(0, "Optimizer steps (mini-batches) of linear warm-up.", ge=0)
    scheduler: str = key("constant_with_warmup", "Name of a transformers schedule, over the updates of the whole run.")


class CriticOptimizerConfig(OptimizerConfig):
    """`trainer.critic.optimizer_config.*`."""

    lr: float = key(5e-6, "Peak learning rate.", ge=0)


class MixedPrecisionConfig(ConfigPart):
    """`trainer.policy.fsdp_config.mixed_precision.*`."""

    param_dtype: Precision = key("bf16", "Dtype of gathered parameters and of the forward pass.")
    reduce_dtype: Precision = key("fp32", "Dtype in which gradients are reduced.")
    buffer_dtype: Precision = key("fp32", "Dtype of buffers.")


class FSDPConfig(ConfigPart):
    """`trainer.policy.fsdp_config.*`."""

    cpu_offload: bool = key(False, "Keep shards in host memory.")
    reshard_after_forward: bool | int = key(True, "Free gathered parameters after the forward pass.")
    fsdp_size: int = key(-1, "Ranks that share one sharded copy; -1: all of them. Must divide the number of ranks.")
    wrap_policy: dict[str, Any] = key(
        {},
        "transformer_layer_cls_to_wrap: class names of the layers that are sharded one by one; unset: the model's own.",
    )
    mixed_precision: MixedPrecisionConfig | None = key(
        None,
        "Unset: bf16 parameters with fp32 reduction where trainer.bf16 holds on a GPU, fp32 on CPU.",
    )


class PolicyConfig(ConfigPart):
    """`trainer.policy.*`."""

    model: ModelConfig = section(ModelConfig)
    optimizer_config: OptimizerConfig = section(OptimizerConfig)
    fsdp_config: FSDPConfig = section(FSDPConfig)
    megatron_config: MegatronConfig = section(MegatronConfig)
    model_config_kwargs: dict[str, Any] = key({}, "Overrides of the model's own configuration.")
    language_model_only: bool = key(False, "Train the language part of a multimodal model; there is no other way here.")
    sequence_parallel_size: int = key(1, "Workers that share one sequence; here each takes whole ones.", ge=1)
    use_torch_compile: bool = key(False, "Compile the model; it runs uncompiled here.")
    record_memory: bool = key(False, "Snapshots of the allocator; none are taken here.")
    torch_profiler_config: TorchProfilerConfig = section(TorchProfilerConfig)
    inference_only_init: bool = key(False, "Build a policy that cannot be trained; only false is possible here.")


class CriticConfig(ConfigPart):
    """`trainer.critic.*`: the model that says what each token leads one to expect."""

    model: CriticModelConfig = section(CriticModelConfig)
    optimizer_config: CriticOptimizerConfig = section(CriticOptimizerConfig)
    fsdp_config: FSDPConfig = section(FSDPConfig)
    model_config_kwargs: dict[str, Any] = key({}, "Overrides of the model's own configuration.")
    sequence_parallel_size: int = key(1, "Workers that share one sequence; here each takes whole ones.", ge=1)


class RefConfig(ConfigPart):
    """`trainer.ref.*`: the frozen model of the KL term."""

    model: RefModelConfig = section(RefModelConfig)
    fsdp_config: FSDPConfig = section(FSDPConfig)
    megatron_config: MegatronConfig = section(MegatronConfig)
    model_config_kwargs: dict[str, Any] = key({}, "Overrides of the model's own configuration.")
    language_model_only: bool = key(False, "Use the language part of a multimodal model; there is no other way here.")
    sequence_parallel_size: int = key(1, "Workers that share one sequence; here each takes whole ones.", ge=1)
