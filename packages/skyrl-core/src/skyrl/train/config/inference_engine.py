"""Which rollout server is used and how it is started (`generator.inference_engine.*`)."""

from __future__ import annotations

from typing import Any, Literal

from skyrl.train.config.part import ConfigPart, Texts, key


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
        "How weights travel: auto, shm (one host) or inline (over gRPC); nccl is mapped to auto.",
        theirs="nccl",
        reason="weights go through the seam; shared memory on one host, the gRPC stream across hosts",
    )

    tensor_parallel_size: int = key(1, "GPUs per server.", ge=1)
    max_num_seqs: int = key(1024, "Sequences that a server runs at once.", ge=1)
    max_num_batched_tokens: int = key(8192, "Tokens per engine step.", ge=1)
    gpu_memory_utilization: float = key(0.8, "Share of the GPU's memory that a server takes.", gt=0, le=1)
    enforce_eager: bool = key(False, "No graph capture or compilation in the server.")
    enable_prefix_caching: bool = key(True, "Reuse the KV cache of equal prefixes within one weight version.")
    distributed_executor_backend: str = key("mp", "How a server spawns its GPU workers.", theirs="ray", reason=(
        "a server is one process tree on one machine, outside the trainer's Ray cluster"))  # fmt: skip
    engine_init_kwargs: dict[str, Any] = key({}, "Further arguments of the engine, passed through by name.")

    server_start_timeout_s: float = key(900.0, "How long a server may take until it serves (an addition).", gt=0)
    request_timeout_s: float = key(1800.0, "How long one generation may take (an addition).", gt=0)
    publish_timeout_s: float = key(600.0, "How long one weight publish may take (an addition).", gt=0)
