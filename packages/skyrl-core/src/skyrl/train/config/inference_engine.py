"""Which rollout server is used and how it is started (`generator.inference_engine.*`)."""

from __future__ import annotations

from typing import Any, Literal

from skyrl.train.config.part import ConfigPart, Texts, key


class DeltaWeightSyncConfig(ConfigPart):
    """`generator.inference_engine.delta_weight_sync.*`: files that carry deltas; here they go through the protocol."""

    sync_dir: str | None = key(None, "Folder or bucket of the deltas.")
    local_checkpoint_dir: str | None = key(None, "Folder in which a server keeps a copy.")
    publish_staging_dir: str | None = key(None, "Folder in which the trainer writes first.")
    max_file_size_in_gb: float = key(1.0, "Size of one file.", gt=0)
    cloud_download_workers: int = key(4, "Downloads at once.", ge=1)
    publish_num_workers: int | None = key(None, "Writers at once.", ge=1)
    checkpoint_load_format: Literal["vllm_multi_thread_safetensors", "vllm_fastsafetensors"] = key(
        "vllm_multi_thread_safetensors", "How a server reads them."
    )
    multi_thread_safetensors_max_workers: int = key(8, "Readers at once.", ge=1)


class InferenceEngineConfig(ConfigPart):
    """`generator.inference_engine.*`. A server is connected to (external_server_urls) or started (server_command, else
    backend looked up in the servers table)."""

    backend: str = key(
        "vllm",
        "Name in the servers table ([tool.skyrl.servers] of the workspace root).",
    )
    external_server_urls: Texts | None = key(
        None,
        "Servers that run already: ['grpc://host:port', 'unix:///path']. Nothing is started. ['file:///path']: one url "
        "a line, read again when it changes; servers join and leave the run with it.",
    )
    server_command: str | Texts | None = key(
        None,
        "Command that starts a server; {model}, {listen}, {dtype} and {seed} are filled in (an addition of ours).",
    )
    run_engines_locally: bool = key(True, "Start the servers; false needs external_server_urls.")
    num_engines: int = key(1, "Servers to start.", ge=1)
    model_dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "auto",
        "Dtype that the server computes in; auto is float32 on CPU and bfloat16 on a GPU.",
        theirs="bfloat16",
        reason="bfloat16 is emulated on CPU: ten times slower and less exact",
    )
    weight_sync_backend: str = key(
        "auto",
        "How weights travel: auto, shm (one host) or inline (over gRPC); nccl is mapped to auto; delta: only what "
        "changed, to servers that offer it.",
        theirs="nccl",
        reason="weights go through the seam; shared memory on one host, the gRPC stream across hosts",
    )

    delta_weight_sync: DeltaWeightSyncConfig | None = key(None, "Files of weight_sync_backend=delta in public SkyRL.")
    weight_transfer_threshold_cuda_ipc_GB: float = key(1.0, "Size of one CUDA IPC chunk; none are sent here.")
    offload_kv_for_weight_sync: bool = key(False, "Give up the KV cache during a publish; it stays here.")

    tensor_parallel_size: int = key(1, "GPUs per layer of a server.", ge=1)
    pipeline_parallel_size: int = key(1, "Stages of layers of a server, each on GPUs of its own.", ge=1)
    expert_parallel_size: int = key(1, "GPUs that share the experts of a server: 1, or all of its GPUs.", ge=1)
    data_parallel_size: int = key(1, "Copies of each of num_engines: so many times as many servers.", ge=1)
    max_num_seqs: int = key(1024, "Sequences that a server runs at once.", ge=1)
    max_num_batched_tokens: int = key(8192, "Tokens per engine step.", ge=1)
    gpu_memory_utilization: float = key(0.8, "Share of the GPU's memory that a server takes.", gt=0, le=1)
    enforce_eager: bool = key(False, "No graph capture or compilation in the server.")
    enable_prefix_caching: bool = key(True, "Reuse the KV cache of equal prefixes within one weight version.")
    distributed_executor_backend: str = key("mp", "How a server spawns its GPU workers.", theirs="ray", reason=(
        "a server is one process tree on one machine, outside the trainer's Ray cluster"))  # fmt: skip
    speculative_config: dict[str, Any] | None = key(None, "Speculative decoding, as the engine takes it.")
    language_model_only: bool = key(False, "Serve the language part of a multimodal model.")
    enable_chunked_prefill: bool = key(True, "It changes nothing in public SkyRL; the engine decides.")
    enable_return_routed_experts: bool = key(False, "Return the experts of each token; only false is possible here.")
    vllm_v1_disable_multiproc: bool = key(True, "It changes nothing in public SkyRL either.")
    use_expandable_segments: bool = key(False, "A setting of the CUDA allocator; here PYTORCH_CUDA_ALLOC_CONF.")
    enable_ray_prometheus_stats: bool = key(True, "Figures of a Ray actor; a server here is none.")
    served_model_name: str | None = key(None, "Name of the model in requests; requests name none here.")
    enable_pd: bool = key(False, "Prefill and decode in servers of their own; only false is possible here.")
    num_prefill: int = key(0, "Servers that prefill.", ge=0)
    router_init_kwargs: dict[str, Any] = key({}, "Settings of a router; the trainer balances itself here.")
    engine_init_kwargs: dict[str, Any] = key({}, "Further arguments of the engine, passed through by name.")

    @property
    def num_servers(self) -> int:
        """Servers that a run starts."""
        return self.num_engines * self.data_parallel_size

    @property
    def gpus_per_server(self) -> int:
        """GPUs that one server is given."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    server_start_timeout_s: float = key(900.0, "How long a server may take until it serves (an addition).", gt=0)
    request_timeout_s: float = key(1800.0, "How long one generation may take (an addition).", gt=0)
    publish_timeout_s: float = key(600.0, "How long one weight publish may take (an addition).", gt=0)
