"""The live line of a run: step, reward, seconds per step, ETA and what it waits for.

On a terminal the line is redrawn in place. Elsewhere every step prints one line, and a wait of more than ten seconds
prints what is waited for.
"""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

QUIET_S = 10.0


class Progress:
    """Thread-safe; use as a context manager. `enabled=False` prints nothing."""

    def __init__(self, total_steps: int, *, enabled: bool = True) -> None:
        self._total, self._enabled = total_steps, enabled
        self._lock = threading.Lock()
        self._step = self._first_step = 0
        self._reward: float | None = None
        self._seconds_per_step: float | None = None
        self._waiting, self._waiting_since = "start", time.monotonic()
        self._last_print = time.monotonic()
        self._console = Console(file=sys.stdout)
        self._live: Live | None = None
        self._closed = threading.Event()
        self._ticker: threading.Thread | None = None

    def __enter__(self) -> Self:
        if not self._enabled:
            return self
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=lambda: Text(self.line()), console=self._console, refresh_per_second=4, transient=True
            )
            self._live.start()
        else:
            self._ticker = threading.Thread(target=self._tick, name="progress", daemon=True)
            self._ticker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        if self._live is not None:
            self._live.stop()
        if self._ticker is not None:
            self._ticker.join(timeout=2)

    def resume_at(self, step: int, total_steps: int) -> None:
        """Steps up to `step` are already done; called once when training starts."""
        with self._lock:
            self._step = self._first_step = step
            self._total = total_steps

    def waiting_for(self, what: str) -> None:
        """What the run does or waits for from here on, as a noun phrase."""
        with self._lock:
            if what != self._waiting:
                self._waiting, self._waiting_since = what, time.monotonic()

    def step_done(self, step: int, *, reward: float, seconds: float) -> None:
        """One step is complete; `seconds` is its wall time."""
        with self._lock:
            done = step - self._first_step
            mean = self._seconds_per_step
            self._seconds_per_step = seconds if mean is None else mean + (seconds - mean) / min(done, 20)
            self._step, self._reward = step, reward
        if self._enabled and self._live is None:
            self._print(self.position())

    def note(self, text: str) -> None:
        """One line above the live line."""
        if self._enabled:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
            self._last_print = time.monotonic()

    def position(self) -> str:
        """Step, reward, speed and ETA."""
        with self._lock:
            parts = [f"step {self._step}/{self._total}"]
            if self._reward is not None:
                parts.append(f"reward {self._reward:.3f}")
            if self._seconds_per_step is not None:
                left_s = (self._total - self._step) * self._seconds_per_step
                parts += [f"{self._seconds_per_step:.2f} s/it", f"ETA {clock(left_s)}"]
        return " | ".join(parts)

    def line(self) -> str:
        """The position, and what is waited for."""
        position = self.position()
        with self._lock:
            waited_s = time.monotonic() - self._waiting_since
            since = f" ({waited_s:.0f} s)" if waited_s >= 2 else ""
            return f"{position} | waiting for {self._waiting}{since}"

    def _print(self, line: str) -> None:
        self._last_print = time.monotonic()
        print(line, flush=True)

    def _tick(self) -> None:
        while not self._closed.wait(1.0):
            if time.monotonic() - self._last_print > QUIET_S:
                self._print(self.line())


def clock(seconds: float) -> str:
    """3725 -> '1:02:05', 65 -> '1:05'."""
    minutes, s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{s:02d}" if hours else f"{minutes}:{s:02d}"
