"""How the engine's processes learn that the server's front is gone: they die with it, also when it was killed.

A forked engine process sets it up before it runs anything; one that vLLM spawns does it when vLLM loads its plugins
(entry point `vllm.general_plugins`), which is before the model is loaded.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
from collections.abc import Callable

FRONT_PID_VARIABLE = "SKYRL_SERVE_FRONT_PID"
PR_SET_PDEATHSIG = 1


def name_front() -> None:
    """Call in the front, from its main thread, before any engine process starts."""
    os.environ[FRONT_PID_VARIABLE] = str(os.getpid())


def watch_forks(prepare_child: Callable[[], None]) -> Callable[[], None]:
    """Every child forked from here on dies with this process and first runs `prepare_child`; returns what ends that."""
    front, on = os.getpid(), [True]

    def in_child() -> None:
        if on and os.getppid() == front:
            on.clear()  # its own children are not engine processes
            _leave_group()
            _die_with_parent(front)
            prepare_child()

    os.register_at_fork(after_in_child=in_child)
    return on.clear


def watch_front() -> None:
    """The plugin: in a process that vLLM spawned for a front, die with that front. Elsewhere nothing happens."""
    front = int(os.environ.get(FRONT_PID_VARIABLE, "0"))
    if not front or front == os.getpid():
        return
    if os.getppid() == front:
        _die_with_parent(front)
    else:
        _poll_front(front)


def _leave_group() -> None:
    # Ctrl-C and a launcher's SIGTERM go to the front's process group; the front drains, then ends the engine itself
    os.setpgid(0, 0)


def _die_with_parent(front: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != front:  # it died before the call above
        os._exit(1)


def _poll_front(front: int) -> None:
    try:
        fd = os.pidfd_open(front)
    except ProcessLookupError:
        os._exit(1)

    def wait() -> None:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        poller.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="front-watch", daemon=True).start()
