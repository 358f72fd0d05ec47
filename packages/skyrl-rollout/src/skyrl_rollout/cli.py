"""`skyrl-rollout`: serve the reference engine, look at a server, ask it, and check that it keeps the protocol."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from skyrl_rollout import probe, quick_generate
from skyrl_rollout.conformance import command as conformance
from skyrl_rollout.errors import RolloutError
from skyrl_rollout.reference.engine import ReferenceEngine
from skyrl_rollout.server import add_server_options, options_from, serve

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


@dataclass(frozen=True)
class Command:
    """One subcommand: what it says about itself, its flags, and what runs it and returns the exit code."""

    help: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    examples: str = ""


def main(argv: list[str] | None = None) -> int:
    """Parses the command line, runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(prog="skyrl-rollout", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=command.help,
            description=command.help,
            epilog=command.examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_options(sub)
    args = parser.parse_args(argv)
    try:
        return COMMANDS[args.command].run(args)
    except RolloutError as error:
        print(f"error: {error.message}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


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
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
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


def add_reference_command(parser: argparse.ArgumentParser) -> None:
    """The flags of the command `reference`."""
    add_reference_options(parser)
    add_server_options(parser)


COMMANDS = {
    "reference": Command("serve deterministic tokens without a model", add_reference_command, run_reference),
    "probe": Command(probe.HELP, probe.add_options, lambda args: asyncio.run(probe.run(args)), probe.EXAMPLES),
    "generate": Command(
        quick_generate.GENERATE_HELP,
        quick_generate.add_generate_options,
        lambda args: asyncio.run(quick_generate.generate(args)),
        quick_generate.GENERATE_EXAMPLES,
    ),
    "score": Command(
        quick_generate.SCORE_HELP,
        quick_generate.add_score_options,
        lambda args: asyncio.run(quick_generate.score(args)),
        quick_generate.SCORE_EXAMPLES,
    ),
    "conformance": Command(
        conformance.HELP,
        conformance.add_options,
        lambda args: asyncio.run(conformance.run_command(args)),
        conformance.EXAMPLES,
    ),
}


if __name__ == "__main__":
    sys.exit(main())
