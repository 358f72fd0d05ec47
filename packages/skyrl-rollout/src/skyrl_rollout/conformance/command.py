"""`skyrl-rollout conformance`: the suite against any endpoint, as a table or as JSON."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import grpc.aio

from skyrl_rollout.channel import parse_url
from skyrl_rollout.conformance.expected import unexpected
from skyrl_rollout.conformance.item import FAILED, Failed, Item, Outcome
from skyrl_rollout.conformance.launching import FLAGS, Launcher
from skyrl_rollout.conformance.report import as_json, heading, line, totals
from skyrl_rollout.conformance.suite import Plan, connected, run
from skyrl_rollout.conformance.table import BY_NUMBER, ITEMS
from skyrl_rollout.endpoint import add_endpoint_options, credentials_from
from skyrl_rollout.errors import from_rpc_error

HELP = "check whether a server keeps the protocol"
EXAMPLES = f"""The suite publishes weights, pauses and cancels: give it a server that nobody trains with.

An item is passed, failed, not run (something it needs is missing: a model folder, a launcher, credentials) or not
offered (the server does not list the capability). (E) marks items that need an engine's logits; the reference server
stands in with --logits canary. The exit code is 0 if nothing failed.

examples:
  skyrl-rollout conformance grpc://127.0.0.1:50051
  skyrl-rollout conformance grpc://127.0.0.1:50051 --only 8,9 --json
  skyrl-rollout conformance --launcher 'skyrl-rollout reference --listen {{listen}} --logits canary --delta'
  skyrl-rollout conformance --model DIR --launcher 'my-server --model {{model}} --listen {{listen}}' \\
      --launcher-flags max_concurrent='--queue {{value}}' --launcher-flags token_file=

What --launcher-flags can replace, and its value here ("" says that the command has no such flag):
{chr(10).join(f"  {name}={template}" for name, template in FLAGS.items())}"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    add_endpoint_options(parser, optional=True)
    parser.add_argument("--rollout-token-file", type=Path, metavar="PATH", help="a token of the lesser role (item 51)")
    parser.add_argument("--model", type=Path, metavar="DIR", help="the folder of the model that is served")
    parser.add_argument("--launcher", metavar="CMD", help="starts a server: {listen} and {model} are filled in")
    parser.add_argument("--launcher-flags", action="append", default=[], metavar="NAME=TEMPLATE", help="see below")
    parser.add_argument("--only", type=numbers, default=ITEMS, metavar="N,N,...", help="these items")
    parser.add_argument("--long", action="store_true", help="nothing is shortened: item 18 is silent for 60 s")
    parser.add_argument("--expect", metavar="SERVER", help="fail unless all is as the suite says of this server")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")


def numbers(text: str) -> tuple[Item, ...]:
    """The items of "8,9" or "30-33". Raises ArgumentTypeError."""
    wanted: list[Item] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not (first.strip().isdecimal() and (last or first).strip().isdecimal()):
            raise argparse.ArgumentTypeError(f"{part!r} is not a number of an item: write 8,9 or 30-33")
        between = range(int(first), int(last or first) + 1)
        if not between or not all(n in BY_NUMBER for n in (between[0], between[-1])):
            raise argparse.ArgumentTypeError(f"there are items 1 to {len(ITEMS)}, not {part}")
        wanted += [BY_NUMBER[n] for n in between]
    return tuple(dict.fromkeys(wanted))


async def run_command(args: argparse.Namespace) -> int:
    """0 where nothing failed (with --expect: where all is as expected). Raises ValueError, RolloutError."""
    plan = plan_from(args)
    try:
        async with connected(plan) as target:
            if not args.json:
                print(heading(target), flush=True)
            outcomes = await run(target, args.only, tell=(lambda o: None) if args.json else _print_line)
            server = {"url": target.url, "build": target.info.server_build, "instance_id": target.info.instance_id}
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, endpoint=plan.url or "the launched server") from None
    except Failed as error:
        raise ValueError(str(error)) from None
    print(as_json(outcomes, server) if args.json else f"\n{totals(outcomes)}")
    return _exit_code(outcomes, args.expect)


def plan_from(args: argparse.Namespace) -> Plan:
    """Raises ValueError for arguments that do not go together."""
    if args.url is not None:
        parse_url(args.url)
    if args.model is not None and not args.model.is_dir():
        raise ValueError(f"--model {args.model} is not a folder: give the folder of the model that is served")
    flags = dict(pair.split("=", 1) for pair in args.launcher_flags if "=" in pair)
    if len(flags) != len(args.launcher_flags):
        raise ValueError("--launcher-flags takes NAME=TEMPLATE, once for each name")
    launcher = None if args.launcher is None else Launcher(args.launcher, model=args.model, flags=flags)
    token = None if args.rollout_token_file is None else args.rollout_token_file.read_text().strip()
    return Plan(args.url, launcher, args.model, credentials_from(args), token, args.long)


def _print_line(outcome: Outcome) -> None:
    print(line(outcome), flush=True)


def _exit_code(outcomes: Sequence[Outcome], server: str | None) -> int:
    if server is None:
        return int(any(o.status == FAILED for o in outcomes))
    wrong = unexpected(outcomes, server)
    for sentence in wrong:
        print(sentence)
    return int(bool(wrong))
