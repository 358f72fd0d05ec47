"""Engine steps as the front sees them: how many there were, and what the scheduler said last."""

from __future__ import annotations

import asyncio
from typing import Any

from vllm.logprobs import FlatLogprobs
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.stats import SchedulerStats

from skyrl_arctic_inference.engine.streams import SampleTokens


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

    def process_outputs(self, engine_core_outputs: list[EngineCoreOutput], *rest: Any) -> Any:
        """Counts preemptions for the samples, and forgets top logprobs that were handed out: vLLM keeps them all."""
        for output in engine_core_outputs:
            if output.events and (state := self.request_states.get(output.request_id)) is not None:
                preempted = sum(event.type == EngineCoreEventType.PREEMPTED for event in output.events)
                if preempted and isinstance(state.queue, SampleTokens):
                    state.queue.num_preemptions += preempted
        processed = super().process_outputs(engine_core_outputs, *rest)
        for output in engine_core_outputs:
            state = self.request_states.get(output.request_id)
            if state is not None and state.logprobs_processor.num_logprobs:
                state.logprobs_processor.logprobs = FlatLogprobs()
        return processed

    def expect(self, mark: SchedulerStats) -> asyncio.Future[None]:
        """A future that is done when `mark` comes by; one mark at a time."""
        future = asyncio.get_running_loop().create_future()
        self._mark = (mark, future)
        return future
