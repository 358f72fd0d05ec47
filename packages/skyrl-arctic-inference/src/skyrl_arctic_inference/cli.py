"""`arctic-serve`: a rollout server on vLLM in a process of its own."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from skyrl_rollout.server.options import add_server_options, options_from

from skyrl_arctic_inference.settings import DTYPES, ServeSettings, default_cores, installed_device

EXIT_USAGE = 2


def main(argv: list[str] | None = None) -> int:
    """Parses the command line, serves, and returns the exit code; an error of the user is one line and exit code 2."""
    args = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        settings = ServeSettings(
            model=args.model,
            device=installed_device(),
            dtype=args.dtype,
            max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
            gpu_memory_utilization=args.gpu_memory_utilization,
            kv_cache_gib=args.kv_cache_gib,
            tensor_parallel_size=args.tensor_parallel_size,
            enforce_eager=args.enforce_eager,
            seed=args.seed,
            cpu_cores=args.cpu_cores,
            max_top_logprobs=args.max_top_logprobs,
            max_loras=args.max_loras,
            max_lora_rank=args.max_lora_rank,
            enable_sleep=args.enable_sleep,
            offer_gloo=args.offer_gloo,
        ).with_engine_args(_collected(args.engine_arg))
        options = options_from(args, world_size=settings.tensor_parallel_size)
        from skyrl_arctic_inference.server import run  # imports gRPC; the errors above come at once

        code = run(settings, options)
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)  # the interpreter takes two seconds to unload torch and vLLM; everything is closed by then
    except (ValueError, OSError) as error:
        print(f"arctic-serve: error: {error}", file=sys.stderr, flush=True)
        return EXIT_USAGE


def build_parser() -> argparse.ArgumentParser:
    """Every flag; those of the serving kit among them."""
    parser = argparse.ArgumentParser(prog="arctic-serve", description=__doc__)
    group = parser.add_argument_group("engine")
    group.add_argument("--model", type=Path, required=True, metavar="DIR", help="folder of a Hugging Face checkpoint")
    group.add_argument("--dtype", choices=DTYPES, default="auto", help="auto: float32 on a CPU, else the checkpoint's")
    group.add_argument("--max-model-len", type=int, metavar="N", help="prompt and answer; default the model's")
    group.add_argument("--max-num-seqs", type=int, default=64, metavar="N", help="sequences decoded together")
    group.add_argument("--gpu-memory-utilization", type=float, default=0.9, metavar="X", help="share of its memory")
    group.add_argument("--kv-cache-gib", type=float, metavar="GIB", help="size of the KV cache; default 1 on a CPU")
    group.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N")
    group.add_argument(
        "--enforce-eager", action=argparse.BooleanOptionalAction, help="do not compile the model; default on a CPU"
    )
    group.add_argument("--seed", type=int, default=0, help="of the engine; requests bring their own")
    group.add_argument(
        "--cpu-cores",
        type=int,
        default=default_cores(),
        metavar="N",
        help="cores to which the engine's threads are bound, the last N allowed ones; default OMP_NUM_THREADS or half",
    )
    group.add_argument("--max-top-logprobs", type=int, default=128, metavar="N", help="per position; default 128")
    group.add_argument("--max-loras", type=int, default=0, metavar="N", help="adapters beside the base; default none")
    group.add_argument("--max-lora-rank", type=int, default=16, metavar="R", help="of any adapter; default 16")
    group.add_argument("--enable-sleep", action="store_true", help="offer Sleep and WakeUp; needs a GPU")
    group.add_argument("--offer-gloo", action="store_true", help="offer updates over gloo, NCCL's stand-in on a CPU")
    group.add_argument(
        "--engine-arg",
        action="append",
        default=[],
        type=_key_value,
        metavar="KEY=JSON",
        help="any engine argument under the name of vLLM's AsyncEngineArgs; wins over the flags; may be repeated",
    )
    add_server_options(parser)
    return parser


def _key_value(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=JSON, such as block_size=32")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value  # a bare word is a string


def _collected(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError for a key given twice."""
    keys = [key for key, _ in pairs]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ValueError(f"--engine-arg {twice[0]} is given twice: keep one")
    return dict(pairs)


if __name__ == "__main__":
    sys.exit(main())
