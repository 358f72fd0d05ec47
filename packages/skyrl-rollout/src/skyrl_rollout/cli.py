"""`skyrl-rollout`: commands of the seam package that need no model and no accelerator."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from pathlib import Path

from skyrl_rollout.reference.engine import ReferenceEngine
from skyrl_rollout.server import add_server_options, options_from, serve

EXIT_USAGE = 2


def main(argv: list[str] | None = None) -> int:
    """Parses the command line, runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(prog="skyrl-rollout", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    reference = commands.add_parser("reference", help="serve deterministic tokens without a model")
    add_reference_options(reference)
    add_server_options(reference)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        return run_reference(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_USAGE


def add_reference_options(parser: argparse.ArgumentParser) -> None:
    """The flags of `ReferenceEngine`."""
    group = parser.add_argument_group("reference engine")
    group.add_argument(
        "--model", type=Path, help="take vocabulary, context, end tokens and tensor layout from a folder"
    )
    group.add_argument("--seed", type=int, default=0, help="of the logits; requests bring their own seed for sampling")
    group.add_argument(
        "--logits", choices=("plain", "canary"), default="plain", help="canary: also depend on one committed tensor"
    )
    group.add_argument("--vocab-size", type=int, default=64, help="without --model")
    group.add_argument("--max-context", type=int, default=4096, help="without --model")
    group.add_argument("--max-running", type=int, default=256, help="samples that make tokens at the same time")
    group.add_argument("--token-delay-ms", type=float, default=0.0, help="wait after every step")


def run_reference(args: argparse.Namespace) -> int:
    """Serves until SIGTERM. Raises ValueError for a bad option or model folder."""
    options = options_from(args)

    async def build() -> ReferenceEngine:
        return ReferenceEngine(
            args.model,
            seed=args.seed,
            canary=args.logits == "canary",
            vocab_size=args.vocab_size,
            max_context=args.max_context,
            max_running=args.max_running,
            token_delay_s=args.token_delay_ms / 1000,
        )

    return asyncio.run(serve(build, options))


if __name__ == "__main__":
    sys.exit(main())
