"""`skyrl-serve --model DIR --listen ADDR`: serves a checkpoint with transformers until SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from skyrl_rollout.server import ParentWatch, add_server_options, options_from, refuse_taken_address, serve
from transformers.utils import logging as transformers_logging

from skyrl.serve.batch import Limits
from skyrl.serve.engine import MAX_TOP_LOGPROBS, TransformersEngine
from skyrl.serve.model import ServedModel

GIB = 1 << 30
EXIT_FAILED, EXIT_USAGE = 1, 2
MOST_TOP_LOGPROBS = 4096  # a position of so many costs the event loop 100 kB until it is sent
PREFIX_SHARE = 4  # KV that is kept beyond running rows: this part of the KV of running rows
SWITCH_INTERVAL_S = 0.001  # the event loop must not keep the engine's thread waiting for Python's 5 ms
# Engine arguments as recipes name them -> the flag that has the same meaning here.
ENGINE_ARGUMENTS = {
    "max_model_len": int, "max_num_seqs": int, "max_num_batched_tokens": int, "dtype": str, "kv_cache_gib": float,
    "gpu_memory_utilization": float, "enable_prefix_caching": bool,
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Parses the command line, serves, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="skyrl-serve", description=__doc__)
    add_engine_options(parser)
    add_server_options(parser)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    transformers_logging.disable_progress_bar()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        apply_engine_arguments(args)
        return run(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_USAGE
    except OSError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_FAILED


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """The flags of `ServedModel` and `Limits`."""
    group = parser.add_argument_group("engine")
    group.add_argument("--model", type=Path, required=True, help="folder of a Hugging Face checkpoint")
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    group.add_argument("--dtype", default="auto", help="auto: float32 on a CPU, the checkpoint's own on a GPU")
    group.add_argument("--max-model-len", type=int, help="longest prompt and answer; default: the model's")
    group.add_argument("--max-num-seqs", type=int, default=256, help="samples that make tokens at the same time")
    group.add_argument("--max-num-batched-tokens", type=int, default=8192, help="prompt tokens of one model call")
    group.add_argument("--kv-cache-gib", type=float, help="memory for keys and values; default: 1 on a CPU")
    group.add_argument("--gpu-memory-utilization", type=float, default=0.8, help="share of a GPU's memory to use")
    group.add_argument("--enable-prefix-caching", action="store_true", help="keep KV for prompts that begin alike")
    group.add_argument("--max-top-logprobs", type=int, default=MAX_TOP_LOGPROBS, help="per position; default 128")
    group.add_argument(
        "--engine-arg", action="append", default=[], metavar="NAME=JSON", help="another of these, by its name"
    )


def apply_engine_arguments(args: argparse.Namespace) -> None:
    """--engine-arg wins over the flag of the same name. Raises ValueError for a name or type that is not known."""
    for given in args.engine_arg:
        name, _, text = given.partition("=")
        if name not in ENGINE_ARGUMENTS:
            raise ValueError(f"--engine-arg {given}: known here are {', '.join(ENGINE_ARGUMENTS)}")
        kind = ENGINE_ARGUMENTS[name]
        value = _parsed(text)
        if not isinstance(value, (int, float) if kind is float else kind) or (value is True and kind is not bool):
            raise ValueError(f"--engine-arg {given}: expected a value of type {kind.__name__}")
        setattr(args, name, value)
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}, expected at least 1")
    if not 0 <= args.max_top_logprobs <= MOST_TOP_LOGPROBS:
        raise ValueError(f"--max-top-logprobs is {args.max_top_logprobs}, expected 0 to {MOST_TOP_LOGPROBS}")
    if not 0 < args.gpu_memory_utilization <= 1:
        raise ValueError(f"--gpu-memory-utilization is {args.gpu_memory_utilization}, expected above 0 and at most 1")
    if args.kv_cache_gib is not None and not args.kv_cache_gib > 0:
        raise ValueError(f"--kv-cache-gib is {args.kv_cache_gib}, expected above 0")


def run(args: argparse.Namespace) -> int:
    """Serves until SIGTERM. Raises ValueError for an option or model that cannot be, OSError for a taken address."""
    options = options_from(args)
    refuse_taken_address(options)
    parent = ParentWatch.from_environment(kill_after_s=options.drain_grace_s)
    device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"

    async def build() -> TransformersEngine:
        def load() -> ServedModel:
            return ServedModel(args.model, device=device, dtype=args.dtype, max_context=args.max_model_len)

        model = await asyncio.to_thread(load)
        return TransformersEngine(model, _limits(args, device), max_top_logprobs=args.max_top_logprobs)

    return asyncio.run(serve(build, options, parent=parent))


def _limits(args: argparse.Namespace, device: str) -> Limits:
    if args.kv_cache_gib is not None or device == "cpu":
        kv_bytes = int((args.kv_cache_gib or 1.0) * GIB)
    else:
        total = torch.cuda.get_device_properties(0).total_memory
        kv_bytes = int(total * args.gpu_memory_utilization) - torch.cuda.memory_allocated()
        if kv_bytes <= 0:
            raise ValueError("the weights leave no memory for keys and values: raise --gpu-memory-utilization")
    prefix_bytes = kv_bytes // PREFIX_SHARE if args.enable_prefix_caching else 0
    return Limits(args.max_num_seqs, args.max_num_batched_tokens, kv_bytes - prefix_bytes, prefix_bytes)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
