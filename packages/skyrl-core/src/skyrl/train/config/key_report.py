"""What becomes of each key that the user set: honoured, mapped to something else, unused and why, or refused."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection
from typing import Any

from skyrl.train.backends import KeyReport
from skyrl.train.config import lora_rules
from skyrl.train.config.build import Built
from skyrl.train.config.idle import ALGORITHM_IDLE, Idle
from skyrl.train.config.inert import ALWAYS, why_inert
from skyrl.train.config.mode_rules import MODE_IDLE, generates_only
from skyrl.train.launch.command import ONLY_ON_GPUS
from skyrl.train.launch.table import ServerEntry

Note = tuple[str, str]
ENGINE = "generator.inference_engine."


def report(built: Built, device: str, server: ServerEntry | None) -> KeyReport:
    """Of every key in `built.user_keys`, and of the public keys that it lists already.

    `device` is cpu or cuda; `server` is what starts the rollout servers, None where they run already.
    """
    honoured: list[str] = []
    mapped, unused = dict(built.mapped), dict(built.unused)
    for dotted in built.user_keys:
        note = _note(built.cfg, dotted, device, server)
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


def lines(keys: KeyReport, at_default: Collection[str] = ()) -> list[str]:
    """`12 keys honoured, 3 mapped, 2 unused, 0 refused`, then each one by name; those with one reason in one list.

    Keys `at_default`, which a written config.yaml has by the hundred, are counted and not named.
    """
    parts = (("mapped", keys.mapped), ("unused", keys.unused), ("refused", keys.refused))
    out = [f"{len(keys.honoured)} keys honoured, " + ", ".join(f"{len(part)} {name}" for name, part in parts)]
    if honoured := [key for key in keys.honoured if key not in at_default]:
        out.append(f"  honoured: {', '.join(honoured)}")
    for name, part in parts:
        together: dict[str, list[str]] = {}
        for key, text in part.items():
            if key not in at_default:
                together.setdefault(text, []).append(key)
        out += [f"  {name}: {', '.join(same)}: {text}" for text, same in together.items()]
    if at_default:
        out.append(f"  not named: {len(at_default)} keys that a file gives with their defaults")
    return out


def _note(cfg: Any, dotted: str, device: str, server: ServerEntry | None) -> Note | None:
    """("mapped" or "unused", text), or None where the key is honoured as it stands."""
    if (why := why_inert(dotted)) is not None:
        return "unused", why
    if dotted in ALWAYS:
        return "mapped", ALWAYS[dotted]
    if dotted.startswith(ENGINE):
        return _engine_note(cfg.generator.inference_engine, dotted.removeprefix(ENGINE).split(".")[0], device, server)
    if dotted in LORA_OPTIONS and cfg.trainer.policy.model.lora.rank:
        return _lora_note(dotted.rpartition(".")[2], server)
    for rule in IDLE:
        if any(fnmatch.fnmatchcase(dotted, pattern) for pattern in rule.keys) and rule.holds(cfg):
            return "unused", rule.why
    if device == "cpu" and dotted.startswith("trainer.placement.") and dotted.endswith("_num_gpus_per_node"):
        return "mapped", "worker processes per machine, there being no GPUs"
    if dotted == "trainer.placement.colocate_all" and cfg.trainer.placement.colocate_all:
        what = "GPUs; a server keeps its share of the memory" if device == "cuda" else "cores, each with its own"
        return "mapped", f"trainer and servers share the machine's {what}"
    return None


def _engine_note(engine: Any, name: str, device: str, server: ServerEntry | None) -> Note | None:
    """Of a key under `generator.inference_engine`."""
    if name == "weight_sync_backend" and engine.weight_sync_backend == "nccl":
        return "mapped", "auto: shared memory on one host, the gRPC stream across hosts"
    if name not in STARTED_ONLY:
        return None
    if server is None:
        return "unused", "the servers run already; they were given their own settings"
    if name == "backend" and engine.server_command:
        return "unused", f"{ENGINE}server_command starts the servers"
    if device == "cpu" and name in ONLY_ON_GPUS:
        return "unused", ONLY_ON_GPUS[name]
    if name == "distributed_executor_backend":
        return "mapped", "mp: a server spawns its GPU workers itself, outside the trainer's Ray cluster"
    if name not in ENGINE_OPTIONS or _takes(server, name):
        return None
    absent = f"the command of the server {server.name!r} takes no such option"
    return ("mapped", f"{ALSO_OURS[name]}; {absent}") if name in ALSO_OURS else ("unused", absent)


def _lora_note(name: str, server: ServerEntry | None) -> Note | None:
    """Of a key that only servers read."""
    if server is None:
        return "unused", "the servers run already; they were given their own settings"
    return None if name in (server.lora or {}) else ("unused", f"the server {server.name!r} takes no such option")


def _takes(server: ServerEntry, name: str) -> bool:
    """Whether the server is told this key's value."""
    return name in server.options or (name == "model_dtype" and any("{dtype}" in part for part in server.command))


IDLE = (
    *ALGORITHM_IDLE,
    *MODE_IDLE,
    *lora_rules.IDLE,
    Idle(
        ("trainer.micro_forward_batch_size_per_gpu",),
        lambda cfg: cfg.trainer.max_tokens_per_microbatch > 0,
        "trainer.max_tokens_per_microbatch cuts the micro-batches",
    ),
    Idle(
        ("trainer.gradient_checkpointing_use_reentrant",),
        lambda cfg: not cfg.trainer.gradient_checkpointing,
        "nothing is recomputed (trainer.gradient_checkpointing=false)",
    ),
    Idle(
        ("data.val_data", "generator.eval_*", "trainer.dump_eval_results"),
        lambda cfg: not (cfg.trainer.eval_interval > 0 or cfg.trainer.eval_before_train or generates_only(cfg)),
        "nothing is evaluated (trainer.eval_interval, trainer.eval_before_train)",
    ),
    Idle(
        ("generator.use_conversation_multi_turn", "generator.append_eos_token_after_stop_str_in_multi_turn"),
        lambda cfg: cfg.generator.max_turns == 1,
        "an episode has one turn (generator.max_turns=1)",
    ),
    Idle(
        ("generator.chat_template.source",),
        lambda cfg: cfg.generator.chat_template.name_or_path is None,
        "the tokenizer's own template is used (no generator.chat_template.name_or_path)",
    ),
    Idle(
        ("trainer.num_logger_eval_samples",),
        lambda cfg: cfg.trainer.eval_interval <= 0 and not cfg.trainer.eval_before_train,
        "nothing is evaluated (trainer.eval_interval, trainer.eval_before_train)",
    ),
    Idle(
        ("trainer.num_logger_*_samples",),
        lambda cfg: set(cfg.trainer.logger) <= {"console"},
        "trainer.logger=console prints an example itself (trainer.print_example_interval)",
    ),
    Idle(
        ("trainer.tags",),
        lambda cfg: set(cfg.trainer.logger) <= {"console", "jsonl"},
        "no tracker of trainer.logger has tags",
    ),
    Idle(
        ("environment.env_class",),
        lambda cfg: cfg.environment.reward is not None,
        "environment.reward scores every row",
    ),
    Idle(
        ("generator.append_eos_token_after_stop_str_in_multi_turn",),
        lambda cfg: not cfg.generator.use_conversation_multi_turn,
        "an observation continues the turn (generator.use_conversation_multi_turn=false)",
    ),
    Idle(
        ("trainer.max_ckpts_to_keep",),
        lambda cfg: cfg.trainer.ckpt_interval <= 0,
        "no checkpoint is written (trainer.ckpt_interval)",
    ),
)  # fmt: skip

# What only a server that is started here is told, by its command line.
ENGINE_OPTIONS = (
    "model_dtype", "tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization",
    "enforce_eager", "enable_prefix_caching", "engine_init_kwargs", "expert_parallel_size", "language_model_only",
    "speculative_config",
)  # fmt: skip
STARTED_ONLY = (
    *ENGINE_OPTIONS, "backend", "server_command", "num_engines", "data_parallel_size", "pipeline_parallel_size",
    "distributed_executor_backend", "server_start_timeout_s",
)  # fmt: skip
LORA_OPTIONS = (f"{lora_rules.L}.max_loras", f"{lora_rules.L}.max_cpu_loras")
# Options that the trainer reads too.
ALSO_OURS = {
    "max_num_seqs": "samples that the trainer has in flight per server",
    "tensor_parallel_size": "GPUs that a server sees",
}
