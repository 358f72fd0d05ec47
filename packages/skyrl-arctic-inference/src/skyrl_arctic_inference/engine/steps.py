"""Engine steps as the front sees them: how many there were, and what the scheduler said last."""

from __future__ import annotations

import asyncio

from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.stats import SchedulerStats


class StepObserver(OutputProcessor):
    """vLLM's output processor that also notes each step; vLLM calls it after the outputs of the step are handed out."""

    count = 0
    last_stats = SchedulerStats()
    _mark: tuple[SchedulerStats, asyncio.Future[None]] | None = None

    def update_scheduler_stats(self, scheduler_stats: SchedulerStats | None) -> None:
        if self._mark is not None and scheduler_stats is self._mark[0]:
            self._mark[1].set_result(None)
            self._mark = None
            return
        if scheduler_stats is not None:
            self.count += 1
            self.last_stats = scheduler_stats
        super().update_scheduler_stats(scheduler_stats)

    def expect(self, mark: SchedulerStats) -> asyncio.Future[None]:
        """A future that is done when `mark` comes by; one mark at a time."""
        future = asyncio.get_running_loop().create_future()
        self._mark = (mark, future)
        return future
