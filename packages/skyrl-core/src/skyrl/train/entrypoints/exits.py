"""How a command ends: its exit code, one clear block for what a user can mend, and nothing left running.

0 done; 1 the run failed; 2 the configuration is wrong; 130 Ctrl-C; 143 SIGTERM.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from skyrl_rollout.errors import RolloutError

from skyrl.train.config.problems import ConfigError
from skyrl.train.rollouts.watch import ServerDied

INTERRUPTED, TERMINATED = 130, 143
# What a message alone explains; anything else is a defect and shows its traceback.
EXPLAINED = (ValueError, RolloutError, ServerDied, FileNotFoundError, PermissionError, TimeoutError)

# A signal that was lost comes again after this long.
AGAIN_S = 0.1

_terminated = threading.Event()


def run_to_exit(work: Callable[[], object], *, log_folder: Callable[[], Path | None] = lambda: None) -> None:
    """Runs `work`; returns if it succeeds, else ends the process with the code of what happened.

    `log_folder` tells where the traceback of an explained error goes; it is not shown on the screen.
    """
    previous = _take_sigterm()
    hook, sys.unraisablehook = sys.unraisablehook, _send_again
    try:
        work()
        return
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if code == 0:
            return
    except KeyboardInterrupt:
        code = TERMINATED if _terminated.is_set() else INTERRUPTED
        print(f"\n{'terminated' if _terminated.is_set() else 'interrupted'}", file=sys.stderr)
    except BrokenPipeError:  # whoever read the output has gone, as in `... --help | head`
        code = 1
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except EXPLAINED as error:
        code = 2 if isinstance(error, ConfigError) else 1
        _show(error, log_folder() if code == 1 else None)
    except BaseException:
        code = 1
        traceback.print_exc()
    finally:
        sys.unraisablehook = hook
        _give_back_sigterm(previous)
    leave(code)


def leave(code: int) -> None:
    """Ends this process at once where a thread still computes, in the usual way otherwise."""
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    others = [t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
    if others:
        os._exit(code)
    sys.exit(code)


def _show(error: BaseException, folder: Path | None) -> None:
    print(f"\nerror: {error or type(error).__name__}", file=sys.stderr)
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "error.log"
        path.write_text("".join(traceback.format_exception(error)))
        print(f"(where it happened: {path})", file=sys.stderr)
    except OSError as unwritable:
        print(f"(its traceback could not be written: {unwritable})", file=sys.stderr)


def _send_again(lost: sys.UnraisableHookArgs) -> None:
    """A Ctrl-C that arrives inside a destructor, of which imports run thousands, is dropped by Python: it is repeated
    until it arrives elsewhere."""
    if not issubclass(lost.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(lost)
        return
    again = threading.Timer(AGAIN_S, os.kill, (os.getpid(), signal.SIGINT))
    again.daemon = True
    again.start()


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    """The same orderly end as Ctrl-C, with its own code."""
    _terminated.set()
    signal.raise_signal(signal.SIGINT)


def _take_sigterm() -> signal.Handlers | Callable[[int, FrameType | None], object] | int | None:
    if threading.current_thread() is not threading.main_thread():
        return None
    _terminated.clear()
    return signal.signal(signal.SIGTERM, _on_sigterm)


def _give_back_sigterm(previous: signal.Handlers | Callable[[int, FrameType | None], object] | int | None) -> None:
    if previous is not None:
        signal.signal(signal.SIGTERM, previous)
