"""How a server of the root's servers table is started by hand: in its own environment, in the foreground.

What the trainer does before a run, without the trainer: the same table, the same environment, the same command line.
The server replaces this process, so that Ctrl-C and SIGTERM reach it.

    uv run tools/serve.py reference --model DIR
    uv run tools/serve.py --sync-only             # only makes .venvs/server
    uv run tools/serve.py vllm --model DIR --listen 127.0.0.1:50051 generator.inference_engine.max_num_seqs=64
"""

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.config.build import build
from skyrl.train.config.overrides import parse
from skyrl.train.launch import command, environment, table
from skyrl.train.launch.device import device_of, server_dtype

DEFAULT_LISTEN = "127.0.0.1:50051"
REPORT_EVERY_S = 5.0


def progress_line() -> Callable[[str], None]:
    """What the launcher tells while it waits: one line when it begins, then one every few seconds."""
    last_s = -REPORT_EVERY_S

    def told(what: str) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= REPORT_EVERY_S:
            last_s = time.monotonic()
            print(f"serve: {what}", file=sys.stderr, flush=True)

    return told


def prepare(name: str, model: Path, listen: str, overrides: list[str]) -> list[str]:
    """Bring the server's environment in line with the lock and return its command line.

    Raises ValueError for a name that the table lacks (it lists the known ones) and for a key that does not exist.
    """
    cfg = build(SkyRLTrainConfig, parse([f"generator.inference_engine.backend={name}", *overrides])).cfg
    engine, device = cfg.generator.inference_engine, device_of(cfg)
    entry = table.find(engine)
    binaries = Path(sys.executable).parent
    if entry.package is not None:
        binaries, in_use = environment.ensure(entry, device, progress_line())
        # The server keeps it: no run may change the environment while the server lives.
        os.set_inheritable(in_use, True)
    values = {"model": str(model), "listen": listen, "dtype": server_dtype(cfg), "seed": str(cfg.trainer.seed)}
    return command.build(entry, engine, values, device=device, binaries=binaries)


def main() -> None:
    """Prepare, say the command, become it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="vllm", help="server in [tool.skyrl.servers] (default vllm)")
    parser.add_argument("--model", type=Path, help="folder of a Hugging Face model")
    parser.add_argument(
        "--sync-only", action="store_true", help="bring the server's environment in line, start nothing"
    )
    parser.add_argument("--listen", default=DEFAULT_LISTEN, help=f"host:port or unix:PATH (default {DEFAULT_LISTEN})")
    parser.add_argument("overrides", nargs="*", help="configuration keys, as for a training run")
    options = parser.parse_args()
    if options.model is None and not options.sync_only:
        parser.error("--model DIR is needed to start a server")
    try:
        arguments = prepare(options.name, (options.model or Path()).resolve(), options.listen, options.overrides)
    except ValueError as error:
        parser.exit(2, f"serve: {error}\n")
    if options.sync_only:
        print(f"serve: the environment of {options.name} is in line with the lock", file=sys.stderr)
        return
    print(f"serve: {shlex.join(arguments)}", file=sys.stderr, flush=True)
    variables = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    os.execvpe(arguments[0], arguments, variables)


if __name__ == "__main__":
    main()
