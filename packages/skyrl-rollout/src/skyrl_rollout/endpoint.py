"""Which server a command talks to and what it shows there: the arguments of every command that takes a url."""

from __future__ import annotations

import argparse
from pathlib import Path

from skyrl_rollout.channel import FORMS
from skyrl_rollout.client import RolloutClient
from skyrl_rollout.security import Credentials

CONNECT_S = 8.0


def add_endpoint_options(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """URL and the files with credentials."""
    parser.add_argument("url", metavar="URL", nargs="?" if optional else None, help=FORMS)
    group = parser.add_argument_group("credentials", "without these flags, what $SKYRL_ROLLOUT_*_FILE name")
    group.add_argument("--token-file", type=Path, metavar="PATH", help="file with the bearer token")
    group.add_argument("--ca", type=Path, metavar="PATH", help="PEM file of the roots to trust (grpcs://)")
    group.add_argument("--cert", type=Path, metavar="PATH", help="PEM file of the own certificate (mTLS)")
    group.add_argument("--key", type=Path, metavar="PATH", help="PEM file of its private key")


def credentials_from(args: argparse.Namespace) -> Credentials:
    """Raises ValueError naming a file that cannot be used."""
    given = {"token": args.token_file, "roots": args.ca, "certificate": args.cert, "private_key": args.key}
    if not any(given.values()):
        return Credentials.from_environment()
    try:
        return Credentials.from_files(**given)
    except OSError as error:
        raise ValueError(f"{error.filename}: {error.strerror}: name a file that this process can read") from None


async def connect(args: argparse.Namespace) -> RolloutClient:
    """Raises ValueError for a bad url or file, ServerUnreachable within 8 s, or another RolloutError."""
    return await RolloutClient.connect(args.url, timeout_s=CONNECT_S, credentials=credentials_from(args))
