"""What a run would be, before anything is started: `--check`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from skyrl.train.backends import BackendPlugin
from skyrl.train.config import schema
from skyrl.train.data.files import READERS
from skyrl.train.display import memory
from skyrl.train.environments import registry
from skyrl.train.launch.device import device_of, server_dtype
from skyrl.train.policy.roles import num_workers, roles_of

UNKNOWN = "unknown: the model is not in a folder of this machine"


def report(cfg: Any, plugin: BackendPlugin, key_lines: Sequence[str]) -> Iterator[str]:
    """The lines of the report: resolved configuration, differences, keys, batches, memory. Reads files, starts nothing.

    `key_lines` is what `backends.resolve` announced.
    """
    yield "configuration (as a file, it builds the same run)"
    yield from _indented(cfg.to_yaml().splitlines())
    yield "keys that differ from their defaults"
    yield from _indented(f"{key}: {_text(value)} (default {_text(default)})" for key, value, default in differing(cfg))
    yield f"what the backend {plugin.name} makes of the keys that are set"
    yield from _indented(key_lines)
    yield "batches"
    yield from _indented(batches(cfg))
    yield "memory, estimated from the sizes of the large tensors"
    yield from _indented(memories(cfg, plugin))
    if stops := list(missing(cfg)):
        yield "what a run on this machine would stop at"
        yield from _indented(stops)
    yield "nothing was started"


def missing(cfg: Any) -> Iterator[str]:
    """Data and environments that are not here: reported, not refused, as a run elsewhere or a script of one's own may
    have them."""
    trains = cfg.trainer.mode != "generate"
    evaluates = not trains or cfg.trainer.eval_interval > 0 or cfg.trainer.eval_before_train
    for key, is_read in (("train_data", trains), ("val_data", evaluates)):
        for source in (getattr(cfg.data, key) or ()) if is_read else ():
            path = Path(source).expanduser()
            if path.suffix in READERS and not path.is_file():
                yield f"data.{key}: no such file: {path}"
    rows, train = num_rows(cfg.data.train_data) if trains else None, cfg.trainer.train_batch_size
    if rows is not None and rows < train:
        yield f"data.train_data has {rows} rows, trainer.train_batch_size={train} needs at least as many"
    if cfg.environment.reward is None:
        try:
            registry.require([cfg.environment.env_class])
        except ValueError as unknown:
            yield f"environment.env_class: {unknown}"


def differing(cfg: Any) -> Iterator[tuple[str, Any, Any]]:
    """(key, value, default) of every leaf whose value is not what an empty command line gives."""
    plain = type(cfg)()
    for path, _ in schema.leaves(type(cfg)):
        value, default = _at(cfg, path), _at(plain, path)
        if value != default:
            yield ".".join(path), value, default


def batches(cfg: Any) -> Iterator[str]:
    """The arithmetic from prompts to optimizer steps."""
    trainer, n = cfg.trainer, cfg.generator.n_samples_per_prompt
    train, mini = trainer.train_batch_size, trainer.policy_mini_batch_size
    workers = num_workers(cfg, "policy")
    share = math.ceil(mini * n / workers)
    yield f"a step: {train} prompts x {n} = {train * n} samples"
    yield (
        f"its update: {math.ceil(train / mini)} mini-batches of {mini} prompts = {mini * n} samples, "
        f"{trainer.update_epochs_per_batch} times: {math.ceil(train / mini) * trainer.update_epochs_per_batch} "
        f"optimizer steps"
    )
    if trainer.max_tokens_per_microbatch > 0:
        cut = f"in micro-batches of at most {trainer.max_tokens_per_microbatch} tokens"
    else:
        micro = trainer.micro_train_batch_size_per_gpu
        cut = f"in {math.ceil(share / micro)} micro-batches of at most {micro}"
    yield f"a mini-batch on {workers} workers: at most {share} samples each, {cut}"
    yield f"a sample: at most {memory.longest(cfg)} tokens"
    rows = num_rows(cfg.data.train_data)
    if rows is None:
        yield "steps per epoch: unknown, the training prompts are not in files of this machine"
        return
    steps = rows // train
    total, limit = trainer.epochs * steps, trainer.max_training_steps
    cut = f", where trainer.epochs={trainer.epochs} end" if limit is not None and limit > total else ""
    total = total if limit is None else min(total, limit)
    yield (
        f"an epoch: {rows} rows, {steps} steps (fewer where prompts are longer than {trainer.max_prompt_length} tokens)"
    )
    yield f"the run: {total} steps{cut}"


def num_rows(sources: Sequence[str]) -> int | None:
    """Rows of local files; None where one is somewhere else or is no file of rows."""
    import pyarrow.parquet

    total = 0
    for source in sources:
        path = Path(source).expanduser()
        if not path.is_file():
            return None
        if path.suffix == ".parquet":
            total += pyarrow.parquet.read_metadata(path).num_rows
        elif path.suffix in (".jsonl", ".json"):
            total += sum(1 for line in path.open() if line.strip())
        else:
            return None
    return total


def memories(cfg: Any, plugin: BackendPlugin) -> Iterator[str]:
    """One line for each role and for a server."""
    item = 2 if cfg.trainer.bf16 and device_of(cfg) == "cuda" else 4
    state = plugin.state_memory or memory.sharded_state
    for role in roles_of(cfg):
        size = memory.model_size(getattr(cfg.trainer, role).model.path)
        if size is None:
            yield f"a {role} worker: {UNKNOWN}"
            continue
        used = memory.activations(cfg, size, compute_bytes=item, trained=role != "ref")
        yield f"a {role} worker: {memory.shown(state(cfg, role, size) | used)}"
    if cfg.generator.inference_engine.external_server_urls:
        yield "a server: runs already"
        return
    size = memory.model_size(cfg.trainer.policy.model.path)
    if size is None:
        yield f"a server: {UNKNOWN}"
        return
    parts = memory.server(cfg, size, server_dtype(cfg))
    share = cfg.generator.inference_engine.gpu_memory_utilization
    limit = f"; it keeps to {share:g} of a GPU and queues what does not fit" if device_of(cfg) == "cuda" else ""
    yield f"a server, on each of its devices: {memory.shown(parts)}{limit}"


def _at(part: Any, path: Sequence[str]) -> Any:
    for name in path:
        part = getattr(part, name) if part is not None else None
    return part


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _indented(lines: Any) -> Iterator[str]:
    return (f"  {line}" for line in lines)
