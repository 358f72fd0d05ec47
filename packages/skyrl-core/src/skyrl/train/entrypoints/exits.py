"""How a command ends: its exit code, one clear block for what a user can mend, and nothing left running.

0 done; 1 the run failed; 2 the configuration is wrong; 129 the terminal closed; 130 Ctrl-C; 143 SIGTERM.
"""

from __future__ import annotations

import contextlib
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
from skyrl.train.failures import RunFailed

INTERRUPTED = 130
# Signals with the same orderly end as Ctrl-C, and the code of each; a closed terminal sends the second.
ENDING = {signal.SIGTERM: 143, signal.SIGHUP: 129}
# What a message alone explains; anything else is a defect and shows its traceback.
EXPLAINED = (ValueError, RolloutError, RunFailed, OSError, MemoryError)

SHOW_CURSOR = "\x1b[?25h"
# A signal that was lost comes again after this long.
AGAIN_S = 0.1

Handler = signal.Handlers | Callable[[int, FrameType | None], object] | int | None
_arrived: list[int] = []


def run_to_exit(work: Callable[[], object], *, log_folder: Callable[[], Path | None] = lambda: None) -> None:
    """Runs `work`; returns if it succeeds, else ends the process with the code of what happened.

    `log_folder` tells where the traceback of an explained error goes; it is not shown on the screen.
    """
    previous = _take_signals()
    hook, sys.unraisablehook = sys.unraisablehook, _send_again
    try:
        work()
        return
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if code == 0:
            return
    except KeyboardInterrupt:
        code = ENDING[signal.Signals(_arrived[0])] if _arrived else INTERRUPTED
        _say(f"\n{'terminated' if _arrived else 'interrupted'}")
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
        _give_back(previous)
    leave(code)


def leave(code: int) -> None:
    """Ends this process at once where a thread still computes, in the usual way otherwise."""
    with contextlib.suppress(OSError):  # of a terminal that is gone
        sys.stdout.flush()
        sys.stderr.flush()
        if (terminal := sys.__stdout__) is not None and terminal.isatty():
            # a second Ctrl-C may have cut off the live line, which hides the cursor and replaces sys.stdout
            terminal.write(SHOW_CURSOR)
            terminal.flush()
    logging.shutdown()
    others = [t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
    if others:
        os._exit(code)
    sys.exit(code)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr)


def _show(error: BaseException, folder: Path | None) -> None:
    _say(f"\nerror: {str(error) or type(error).__name__}")
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "error.log"
        path.write_text("".join(traceback.format_exception(error)))
        _say(f"(where it happened: {path})")
    except OSError as unwritable:
        _say(f"(its traceback could not be written: {unwritable})")


def _send_again(lost: sys.UnraisableHookArgs) -> None:
    """A Ctrl-C that arrives inside a destructor, of which imports run thousands, is dropped by Python: it is repeated
    until it arrives elsewhere."""
    if not issubclass(lost.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(lost)
        return
    again = threading.Timer(AGAIN_S, os.kill, (os.getpid(), signal.SIGINT))
    again.daemon = True
    again.start()


def _on_signal(number: int, frame: FrameType | None) -> None:
    _arrived.append(number)
    signal.raise_signal(signal.SIGINT)


def _take_signals() -> dict[int, Handler]:
    """Takes over the signals of `ENDING`, except one that is ignored, as under nohup; returns what stood there."""
    _arrived.clear()
    if threading.current_thread() is not threading.main_thread():
        return {}
    taken = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, _on_signal) for number in taken}


def _give_back(previous: dict[int, Handler]) -> None:
    for number, handler in previous.items():
        signal.signal(number, handler)
