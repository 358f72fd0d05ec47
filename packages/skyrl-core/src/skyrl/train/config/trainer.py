"""The run itself (`trainer.*`): batches, steps, backends, checkpoints, evaluation, trackers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from skyrl.train.config.algorithm import AlgorithmConfig
from skyrl.train.config.fully_async import FullyAsyncConfig
from skyrl.train.config.megatron import MtpConfig
from skyrl.train.config.part import ConfigPart, Texts, key, section
from skyrl.train.config.policy import CriticConfig, PolicyConfig, RefConfig


class PlacementConfig(ConfigPart):
    """Which processes run where (`trainer.placement.*`). Without GPUs, "GPUs per node" counts worker processes."""

    colocate_all: bool = key(True, "Trainer and servers share the devices.")
    colocate_policy_ref: bool = key(True, "Policy and reference share the devices.")
    policy_num_nodes: int = key(1, "Machines of the policy.", ge=1)
    policy_num_gpus_per_node: int = key(1, "Policy workers per machine.", ge=1)
    critic_num_nodes: int = key(1, "Machines of the critic.", ge=1)
    critic_num_gpus_per_node: int = key(1, "Critic workers per machine.", ge=1)
    ref_num_nodes: int = key(
        1, "Machines of the reference; unset, and with devices shared with the policy: the policy's.", ge=1
    )
    ref_num_gpus_per_node: int = key(
        1, "Reference workers per machine; unset, and with devices shared with the policy: the policy's.", ge=1
    )


class TrainerConfig(ConfigPart):
    """`trainer.*`."""

    backend: str = key(
        "fsdp",
        "Which trainer backend runs: a name among the installed ones (an addition).",
    )
    mode: Literal["plain", "one_step_off", "fully_async", "generate"] | None = key(
        None,
        "plain: rollouts and updates take turns; one_step_off: the next batch is made during an update; fully_async: "
        "rollouts never stop; generate: data.val_data is rolled out once and nothing is trained (an addition). Unset: "
        "fully_async with trainer.fully_async.enabled=true, else plain.",
    )
    fully_async: FullyAsyncConfig = section(FullyAsyncConfig)
    rollout_wait_timeout_s: float = key(
        7200.0, "How long a step waits for rollouts while none of them ends (an addition).", gt=0
    )
    strategy: Literal["fsdp", "fsdp2", "megatron"] = key(
        "fsdp", "Sharding of the fsdp backend; fsdp2 is the same thing."
    )
    device: Literal["auto", "cpu", "cuda"] = key("auto", "Where the policy trains (an addition).")
    progress: bool = key(True, "Show progress: a live line on a terminal, a line per step elsewhere (an addition).")
    seed: int = key(42, "Data order, sampling and initialisation derive from it.", ge=0)

    placement: PlacementConfig = section(PlacementConfig)
    policy: PolicyConfig = section(PolicyConfig)
    critic: CriticConfig = section(CriticConfig)
    ref: RefConfig = section(RefConfig)
    algorithm: AlgorithmConfig = section(AlgorithmConfig)

    epochs: int = key(1, "Passes over the training prompts.", ge=1)
    max_training_steps: int | None = key(None, "Stop after this many steps.", gt=0)
    train_batch_size: int = key(1024, "Prompts per step.", ge=1)
    policy_mini_batch_size: int = key(256, "Prompts per optimizer step.", ge=1)
    critic_mini_batch_size: int = key(256, "Prompts per optimizer step of the critic.", ge=1)
    update_epochs_per_batch: int = key(1, "Passes over each batch.", ge=1)
    micro_train_batch_size_per_gpu: int = key(1, "Sequences per backward pass of one worker.", ge=1)
    micro_forward_batch_size_per_gpu: int = key(1, "Sequences per forward-only pass of one worker.", ge=1)
    max_tokens_per_microbatch: int = key(
        -1,
        "Instead of a number of sequences, at most this many tokens (rows x longest row) per pass; 0 or less: off.",
    )
    logprobs_chunk_size: int | None = key(
        1024, "Positions whose logits are widened to float32 at once; null: all of them.", ge=1
    )

    recompute_old_logprobs_per_minibatch: bool = key(True, "Old logprobs in mini-batches; the numbers are the same.")
    remove_microbatch_padding: bool = key(True, "Pack a micro-batch without padding; sequences are flat here.")
    update_ref_every_epoch: bool = key(False, "After each epoch the reference becomes the policy as it is then.")

    max_prompt_length: int = key(512, "Prompts with more tokens are left out.", ge=1)
    flash_attn: bool = key(True, "flash-attn kernels on a GPU; torch's own attention on CPU.")
    bf16: bool = key(True, "Compute in bfloat16 on a GPU; on CPU the trainer computes in float32.")
    gradient_checkpointing: bool = key(True, "Recompute activations in the backward pass.")
    gradient_checkpointing_use_reentrant: bool = key(False, "Variant of gradient checkpointing.")
    disable_fast_tokenizer: bool = key(False, "Use the slow tokenizer.")
    use_expandable_segments: bool = key(True, "A setting of the CUDA allocator; here PYTORCH_CUDA_ALLOC_CONF.")
    sequence_parallel_backend: Literal["ulysses"] = key("ulysses", "How workers share one sequence; none do here.")
    vocab_entropy_chunk_size: int | None = key(0, "Megatron: vocabulary entries of the entropy at once.")
    vocab_entropy_chunk_memory_mb: int = key(512, "Megatron: memory of one such block.")
    fused_lm_head_logprob: bool = key(False, "Megatron: logprobs inside the LM head.")
    fused_lm_head_logprob_backend: str = key("torch", "Megatron: the kernel that does it.")
    mtp: MtpConfig = section(MtpConfig)

    eval_before_train: bool = key(True, "Evaluate before the first step.")
    eval_batch_size: int = key(1024, "Prompts of one evaluation batch; the server queues all of them here.", ge=1)
    eval_interval: int = key(5, "Steps between evaluations; 0 or less: never.")

    resume_mode: Literal["none", "latest", "from_path"] | None = key(
        "none",
        "none, latest (in ckpt_path) or from_path (resume_path).",
        theirs="latest",
        reason="with a shared folder of checkpoints, unrelated runs continued each other",
    )
    resume_path: str | None = key(None, "A global_step_N folder, for resume_mode=from_path.")
    ckpt_path: str | None = key(
        None,
        "Folder of checkpoints; unset means ./runs/<project_name>/<run_name>/ckpts.",
        theirs="~/ckpts/",
        ours="./runs/<project_name>/<run_name>/ckpts",
        reason="each run has a folder of its own",
    )
    ckpt_interval: int = key(10, "Steps between checkpoints, the last step included; 0 or less: never.")
    max_ckpts_to_keep: int = key(-1, "Older checkpoints are deleted; -1 keeps all.", ge=-1)
    export_path: str | None = key(
        None,
        "Folder of Hugging Face exports and dumps; unset means ./runs/<project_name>/<run_name>/exports.",
        theirs="~/exports/",
        ours="./runs/<project_name>/<run_name>/exports",
        reason="each run has a folder of its own",
    )
    dump_eval_results: bool = key(True, "Write evaluation rollouts as JSONL into export_path.")
    dump_data_batch: bool = key(False, "Write every training batch as .npz into export_path.")
    print_example_interval: int = key(1, "Steps between printed example rollouts; 0 or less: never.")
    num_logger_train_samples: int = key(-1, "Training rollouts per step that trackers get as a table; 0 or less: none.")
    num_logger_eval_samples: int = key(-1, "Rollouts per evaluation that trackers get as a table; 0 or less: none.")
    hf_save_interval: int = key(-1, "Steps between Hugging Face exports, the last step included; 0 or less: never.")
    log_path: str | None = key(
        None,
        "Folder of server and worker logs; unset means ./runs/<project_name>/<run_name>/logs.",
        theirs="/tmp/skyrl-logs",
        ours="./runs/<project_name>/<run_name>/logs",
        reason="each run has a folder of its own",
    )

    project_name: str = key("skyrl", "Groups runs.")
    run_name: str = key("test_run", "Names this run.")
    logger: Texts = key(
        ("console", "tensorboard"),
        "Trackers, one or several.",
        theirs="wandb",
        reason="the default run needs no account",
    )
    tags: Texts | None = key(None, "Labels of the run in TensorBoard, wandb and MLflow.")

    enable_ray_gpu_monitor: bool = key(True, "Figures of the GPUs from Ray; not collected here.")

    @property
    def run_folder(self) -> Path:
        """./runs/<project_name>/<run_name>, absolute: where everything goes that has no folder of its own."""
        return (Path("runs") / self.project_name / self.run_name).absolute()

    @property
    def log_folder(self) -> Path:
        """`log_path` as the root fills it in."""
        return Path(self.log_path or self.run_folder / "logs")
