"""What becomes of each key that the user set: honoured, mapped to something else, unused and why, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from skyrl.train.backends import KeyReport
from skyrl.train.config.build import Built

# (cfg, device) -> ("mapped" or "unused", text), or None where the key is honoured as it stands.
Note = Callable[[Any, str], tuple[str, str] | None]

STARTED_ONLY = (
    "backend", "server_command", "num_engines", "model_dtype", "tensor_parallel_size", "max_num_seqs",
    "max_num_batched_tokens", "gpu_memory_utilization", "enforce_eager", "enable_prefix_caching",
    "distributed_executor_backend", "engine_init_kwargs", "server_start_timeout_s",
)  # fmt: skip
LOGPROBS = ("mapped", "the sampled token's logprob always comes")
NOT_ON_CPU = {
    "generator.inference_engine.gpu_memory_utilization": "there is no GPU memory to share",
    "generator.inference_engine.tensor_parallel_size": "a server without GPUs is one worker",
    "generator.inference_engine.distributed_executor_backend": "a server without GPUs is one worker",
}


def report(built: Built, device: str) -> KeyReport:
    """Of every key in `built.user_keys`, and of the public keys that it lists already. `device` is cpu or cuda."""
    honoured: list[str] = []
    mapped, unused = dict(built.mapped), dict(built.unused)
    for dotted in built.user_keys:
        note = _note(built.cfg, dotted, device)
        if note is None:
            honoured.append(dotted)
        else:
            (mapped if note[0] == "mapped" else unused)[dotted] = note[1]
    return KeyReport(tuple(honoured), mapped, unused)


def merged(core: KeyReport, backend: KeyReport) -> KeyReport:
    """The core's report with the backend's: a key is honoured only where both say so, and the backend says why not."""
    mapped = {**core.mapped, **backend.mapped}
    unused = {**core.unused, **backend.unused}
    refused = {**core.refused, **backend.refused}
    mapped = {key: text for key, text in mapped.items() if key not in backend.unused and key not in refused}
    unused = {key: text for key, text in unused.items() if key not in backend.mapped and key not in refused}
    honoured = tuple(dict.fromkeys((*core.honoured, *backend.honoured)))
    return KeyReport(
        tuple(key for key in honoured if key not in mapped and key not in unused and key not in refused),
        mapped,
        unused,
        refused,
    )


def lines(keys: KeyReport) -> list[str]:
    """`12 keys honoured, 3 mapped, 2 unused, 0 refused`, then each one by name."""
    parts = (("mapped", keys.mapped), ("unused", keys.unused), ("refused", keys.refused))
    head = f"{len(keys.honoured)} keys honoured, " + ", ".join(f"{len(part)} {name}" for name, part in parts)
    out = [head]
    if keys.honoured:
        out.append(f"  honoured: {', '.join(keys.honoured)}")
    for name, part in parts:
        out += [f"  {name}: {key}: {text}" for key, text in part.items()]
    return out


def _note(cfg: Any, dotted: str, device: str) -> tuple[str, str] | None:
    engine = "generator.inference_engine."
    external = cfg.generator.inference_engine.external_server_urls
    if external and dotted.startswith(engine) and dotted.removeprefix(engine).split(".")[0] in STARTED_ONLY:
        return "unused", "the servers run already; they were given their own settings"
    if device == "cpu" and dotted in NOT_ON_CPU:
        return "unused", NOT_ON_CPU[dotted]
    if device == "cpu" and dotted.startswith("trainer.placement.") and dotted.endswith("_num_gpus_per_node"):
        return "mapped", "worker processes per machine, there being no GPUs"
    note = NOTES.get(dotted)
    return note(cfg, device) if note else None


def _colocate(cfg: Any, device: str) -> tuple[str, str] | None:
    if not cfg.trainer.placement.colocate_all:
        return None
    what = "GPUs; a server keeps its share of the memory" if device == "cuda" else "cores, each with its own"
    return "mapped", f"trainer and servers share the machine's {what}"


def _weight_sync(cfg: Any, device: str) -> tuple[str, str] | None:
    if cfg.generator.inference_engine.weight_sync_backend != "nccl":
        return None
    return "mapped", "auto: shared memory on one host, the gRPC stream across hosts"


def _executor(cfg: Any, device: str) -> tuple[str, str] | None:
    ray = cfg.generator.inference_engine.distributed_executor_backend == "ray"
    return ("mapped", "mp: a server is not part of the trainer's Ray cluster") if ray else None


NOTES: dict[str, Note] = {
    "trainer.placement.colocate_all": _colocate,
    "generator.inference_engine.weight_sync_backend": _weight_sync,
    "generator.inference_engine.distributed_executor_backend": _executor,
    "generator.batched": lambda cfg, device: ("mapped", "environments are stepped on exact tokens either way"),
    "generator.sampling_params.logprobs": lambda cfg, device: LOGPROBS,
    "generator.eval_sampling_params.logprobs": lambda cfg, device: LOGPROBS,
    "data.dataloader.num_workers": lambda cfg, device: ("unused", "rows are in the trainer's memory"),
    "data.dataloader.persistent_workers": lambda cfg, device: ("unused", "rows are in the trainer's memory"),
}  # fmt: skip
