"""`skyrl-rollout generate` and `score`: a quick look at what a server answers, as ids and logprobs, never as text."""

from __future__ import annotations

import argparse
import json
import time
from contextlib import aclosing
from typing import Any

import numpy as np

from skyrl_rollout.endpoint import add_endpoint_options, connect
from skyrl_rollout.events import Delta, Event, Heartbeat, SampleFinished, Started
from skyrl_rollout.tokens import LogprobMode, Sampling

GENERATE_HELP = "continue a list of token ids and print what comes, as it comes"
SCORE_HELP = "print how probable the later ones of given token ids are"
GENERATE_EXAMPLES = """examples:
  skyrl-rollout generate grpc://127.0.0.1:50051 --tokens 1,2,3 --max-tokens 16
  skyrl-rollout generate grpc://127.0.0.1:50051 --tokens 1,2,3 --temperature 0 --samples 2 --json"""
SCORE_EXAMPLES = """examples:
  skyrl-rollout score grpc://127.0.0.1:50051 --tokens 1,2,3,4 --from 2 --mode raw"""
MODES = {mode.name.lower(): mode for mode in LogprobMode}
EVENT_DELAY_S = 0.1


def add_generate_options(parser: argparse.ArgumentParser) -> None:
    """The flags of `generate`."""
    _add_request_options(parser)
    parser.add_argument("--max-tokens", type=int, default=16, metavar="N", help="per sample; default 16")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy; default 1")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="continuations; default 1")
    parser.add_argument("--seed", type=int, metavar="N", help="default: drawn by the server, which tells it")
    parser.add_argument("--stop-token", type=int, action="append", default=[], metavar="ID", help="may be repeated")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after an end token")


def add_score_options(parser: argparse.ArgumentParser) -> None:
    """The flags of `score`."""
    _add_request_options(parser)
    parser.add_argument("--from", dest="score_from", type=int, default=1, metavar="I", help="first place; default 1")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="default 1")


def _add_request_options(parser: argparse.ArgumentParser) -> None:
    add_endpoint_options(parser)
    parser.add_argument("--tokens", required=True, type=token_ids, metavar="ID,ID,...", help="token ids")
    parser.add_argument("--mode", choices=MODES, default="raw", help="what a logprob means; default raw")
    parser.add_argument("--policy", default="", metavar="ID", help="an adapter; default the base policy")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="seconds for all of it; default 60")
    parser.add_argument("--json", action="store_true", help="one JSON object per event")


def token_ids(text: str) -> np.ndarray:
    """int32 [n]. Raises ArgumentTypeError for what is not a list of ids."""
    parts = [part for part in text.replace(",", " ").split() if part]
    if not parts or not all(part.isdecimal() and int(part) < 1 << 31 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 1,2,3")
    return np.array([int(part) for part in parts], np.int32)


async def generate(args: argparse.Namespace) -> int:
    """Prints every event. Raises RolloutError, ValueError."""
    sampling = Sampling(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
        ignore_eos=args.ignore_eos,
        stop_token_ids=tuple(args.stop_token),
    )
    async with await connect(args) as client:
        events = client.generate_events(
            args.tokens,
            sampling,
            mode=MODES[args.mode],
            timeout_s=args.timeout,
            num_samples=args.samples,
            policy_id=args.policy,
            max_event_delay_s=EVENT_DELAY_S,
            detach_grace_s=0.0,
        )
        began, num_tokens = time.monotonic(), 0
        async with aclosing(events):
            async for event in events:
                num_tokens += len(event.token_ids) if isinstance(event, Delta) else 0
                print(json.dumps(as_dict(event)) if args.json else text(event), flush=True)
    if not args.json:
        print(f"{num_tokens} tokens in {time.monotonic() - began:.3f} s")
    return 0


async def score(args: argparse.Namespace) -> int:
    """Prints a logprob per token. Raises RolloutError, ValueError."""
    async with await connect(args) as client:
        scores = await client.score(
            args.tokens,
            args.score_from,
            mode=MODES[args.mode],
            temperature=args.temperature,
            timeout_s=args.timeout,
            policy_id=args.policy,
        )
    logprobs, ids = _numbers(scores.logprobs), args.tokens[args.score_from :].tolist()
    if args.json:
        said = {"score_from": args.score_from, "token_ids": ids, "logprobs": logprobs, "mode": args.mode}
        print(json.dumps({**said, "weight_version": scores.weight_version}))
    else:
        print(f"version {scores.weight_version}, mode {args.mode}")
        for place, (token, logprob) in enumerate(zip(ids, logprobs, strict=True), args.score_from):
            print(f"  {place:>6}  token {token:<8} {_shown(logprob)}")
    return 0


def as_dict(event: Event) -> dict[str, Any]:
    """One event for a program; an unknown logprob is null."""
    if isinstance(event, Started):
        return {
            "event": "started",
            "instance_id": event.instance_id,
            "weight_version": event.weight_version,
            "mode": event.mode.name.lower(),
            "seed": event.effective.seed,
            "max_tokens": event.effective.max_tokens,
            "cached_prompt_tokens": event.cached_prompt_tokens,
        }
    if isinstance(event, Delta):
        return {
            "event": "delta",
            "sample": event.sample_index,
            "offset": event.offset,
            "token_ids": event.token_ids.tolist(),
            "logprobs": _numbers(event.logprobs),
            "weight_version": event.weight_version,
        }
    if isinstance(event, SampleFinished):
        return {
            "event": "finished",
            "sample": event.sample_index,
            "reason": event.reason.name.lower(),
            "num_tokens": event.num_tokens,
            "spans": [[s.start, s.length, s.weight_version] for s in event.spans],
            "stop_match": event.stop_match,
            "invalid_logprobs": event.invalid_logprobs,
        }
    return {"event": "heartbeat", "phase": event.phase, "tokens_so_far": event.tokens_so_far}


def text(event: Event) -> str:
    """One event in one line, or two."""
    if isinstance(event, Started):
        e = event.effective
        return (
            f"started    version {event.weight_version}, logprobs {event.mode.name.lower()}, seed {e.seed}, at most "
            f"{e.max_tokens} tokens, {event.cached_prompt_tokens} prompt tokens cached, instance {event.instance_id}"
        )
    if isinstance(event, Heartbeat):
        return f"heartbeat  {event.phase}, {event.tokens_so_far} tokens so far"
    if isinstance(event, SampleFinished):
        spans = ", ".join(f"{s.start}-{s.start + s.length} by version {s.weight_version}" for s in event.spans)
        match = "" if event.stop_match is None else f" at {event.stop_match!r}"
        unknown = f", {event.invalid_logprobs} logprobs unknown" if event.invalid_logprobs else ""
        end = f"{event.reason.name}{match} after {event.num_tokens} tokens"
        return f"sample {event.sample_index}   {end}: {spans}{unknown}"
    assert isinstance(event, Delta)
    ids = " ".join(map(str, event.token_ids.tolist()))
    logprobs = " ".join(_shown(v) for v in _numbers(event.logprobs))
    return f"sample {event.sample_index}   from {event.offset}: ids {ids}\n           logprobs {logprobs}"


def _numbers(logprobs: np.ndarray) -> list[float | None]:
    return [None if np.isnan(v) else round(float(v), 6) for v in logprobs]


def _shown(logprob: float | None) -> str:
    return "unknown" if logprob is None else f"{logprob:.4f}"
