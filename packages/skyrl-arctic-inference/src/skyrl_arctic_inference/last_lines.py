"""What this process and its engine processes wrote to stderr last, so that an error can say why an engine died."""

from __future__ import annotations

import os
import re
import select
import threading
from collections import deque

KEPT_LINES = 200
_CAUSE = re.compile(r"\b((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)): (.+)$")
_ECHO = "Engine core initialization failed"  # vLLM's front, which only says that its engine failed


class LastLines:
    """Passes stderr through and keeps its last lines. `close` puts stderr back."""

    def __init__(self) -> None:
        self._real = os.dup(2)
        self._read, write = os.pipe()
        self._wake_read, self._wake_write = os.pipe()
        os.dup2(write, 2)
        os.close(write)
        self._lines: deque[bytes] = deque(maxlen=KEPT_LINES)
        self._partial = b""
        self._thread = threading.Thread(target=self._pass_on, name="last-lines", daemon=True)
        self._thread.start()

    def last(self, n: int) -> list[str]:
        """The last `n` lines, oldest first."""
        return [line.decode(errors="replace") for line in list(self._lines)[-n:]]

    def cause(self) -> str:
        """The last error that a traceback ended with, "" when there was none."""
        for line in reversed(self.last(KEPT_LINES)):
            found = _CAUSE.search(line)
            if found and _ECHO not in line:
                return f"{found[1].rpartition('.')[2]}: {found[2].strip()}"
        return ""

    def close(self) -> None:
        """What was written before is passed on first. Safe to call twice."""
        if self._thread.is_alive():
            os.dup2(self._real, 2)
            os.write(self._wake_write, b".")
            self._thread.join(timeout=2.0)

    def _pass_on(self) -> None:
        poller = select.poll()
        poller.register(self._read, select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poller.poll()}
            if self._read in ready:
                data = os.read(self._read, 65536)
                if not data:  # nobody has the other end any more
                    return
                os.write(self._real, data)
                self._keep(data)
            elif self._wake_read in ready:
                return

    def _keep(self, data: bytes) -> None:
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._lines.extend(lines)
