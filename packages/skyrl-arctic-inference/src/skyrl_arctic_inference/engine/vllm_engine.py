"""The server kit's Engine on vLLM's AsyncLLM: generate, pause, swap weights, and exact counts of tokens made.

It leaves out `AsyncLLM.generate` and hands vLLM's output handler its own queue per sample, because that queue sees
every engine step at once and in order, however slowly anybody reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping

from skyrl_rollout.server.engine import (
    EngineCapabilities,
    EngineLoad,
    EngineRequest,
    ModelIdentity,
    PlainEngine,
    PromptRead,
    SampleEnded,
    TokensMade,
)
from skyrl_rollout.tokens import FinishReason, LogprobMode
from skyrl_rollout.weights.manifest import TensorLayout
from vllm.inputs.engine import tokens_input
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.stats import SchedulerStats

from skyrl_arctic_inference.engine.dead import EngineDead
from skyrl_arctic_inference.engine.identity import ModelFolder
from skyrl_arctic_inference.engine.logprobs import refuse_inexact
from skyrl_arctic_inference.engine.sampling import refuse_changed, vllm_sampling
from skyrl_arctic_inference.engine.staged_bytes import StagedBytes
from skyrl_arctic_inference.engine.steps import StepObserver
from skyrl_arctic_inference.engine.streams import RequestTokens

DRAIN_TIMEOUT_S = 30.0
GPU_SHUTDOWN_TIMEOUT_S = 5.0  # a killed process on a CPU leaves nothing to give back
DTYPES = {"torch.float32": "f32", "torch.float16": "f16", "torch.bfloat16": "bf16"}


class VllmEngine(PlainEngine):
    """See `skyrl_rollout.server.engine.Engine`. Made by `engine.launch.start_engine`, before the event loop runs."""

    def __init__(self, llm: AsyncLLM, steps: StepObserver, folder: ModelFolder, *, on_cpu: bool) -> None:
        config = llm.vllm_config.model_config
        dtype = DTYPES[str(config.dtype)]
        self.identity = ModelIdentity(
            name=folder.path.name,
            vocab_size=config.get_vocab_size(),
            max_context=config.max_model_len,
            eos_token_ids=folder.eos_token_ids,
            dtype=dtype,
            tensors=folder.layout(dtype),
            tokenizer_digest=folder.tokenizer_digest,
        )
        self.capabilities = EngineCapabilities(
            logprob_modes=(LogprobMode.RAW, LogprobMode.TEMPERATURE, LogprobMode.SAMPLING),
            pause_modes=("abort", "wait", "keep"),
            kv_policies=("recompute", "retain"),
            deterministic_seed=on_cpu,  # the same logits in every batch: tests/test_generation.py
            stop_strings=folder.has_tokenizer,
        )
        self._llm = llm
        self._steps = steps
        self._staged = StagedBytes()
        self._eos = frozenset(folder.eos_token_ids)
        self._running: dict[str, RequestTokens] = {}
        self._is_closing = False
        self._shutdown_timeout_s = 0.0 if on_cpu else GPU_SHUTDOWN_TIMEOUT_S

    def check(self, request: EngineRequest) -> None:
        """Raises ValueError for what vLLM would change, approximate, or crash on."""
        refuse_changed(request.sampling, vocab_size=self.identity.vocab_size)
        refuse_inexact(request.mode, request.sampling)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[PromptRead | TokensMade | SampleEnded, None]:
        """Yields what every sample makes. Raises EngineDead when the engine's process is gone."""
        tokens = RequestTokens(request, self._eos)
        self._running[request.request_id] = tokens
        try:
            await self._submit(tokens)
            while True:
                tokens.ready.clear()
                for sample in tokens.samples:
                    for item in sample.drain():
                        yield item
                if tokens.is_done:
                    return
                await tokens.ready.wait()
        except EngineDeadError:
            raise EngineDead() from None
        finally:
            del self._running[request.request_id]
            if ids := tokens.live_ids:
                await self._llm.abort(ids, internal=True)

    async def abort(self, request_id: str) -> None:
        if tokens := self._running.get(request_id):
            tokens.end_with(FinishReason.ABORTED)
            await self._llm.abort(tokens.live_ids, internal=True)

    async def pause(self, mode: str, *, clear_cache: bool) -> None:
        """Returns when every token made before the pause has been counted. Raises RuntimeError when KV should have been
        cleared and was not."""
        if mode == "abort":
            for tokens in self._running.values():
                tokens.end_with(FinishReason.PAUSED)
        try:
            if clear_cache:
                await self._llm.renderer.clear_mm_cache_async()
            await self._llm.engine_core.pause_scheduler_async(mode, clear_cache)
            await self._count_everything()
            if clear_cache and not await self._llm.reset_prefix_cache():
                raise RuntimeError("vLLM did not clear its prefix cache: some blocks are still held")
        except EngineDeadError:
            raise EngineDead() from None

    async def resume(self) -> None:
        try:
            await self._llm.engine_core.resume_scheduler_async()
        except EngineDeadError:
            raise EngineDead() from None

    def tokens_made(self) -> Mapping[str, list[int]]:
        return {request_id: tokens.counts for request_id, tokens in self._running.items()}

    async def load_weights(self, tensors: Iterator[tuple[TensorLayout, memoryview]]) -> None:
        """Stages the bytes where the engine's processes can map them, then swaps. Raises RuntimeError with the worker's
        reason when the model is unusable now."""
        staged = await asyncio.to_thread(self._staged.fill, tensors)
        rows = [t.as_row() for t in staged]
        try:
            await self._llm.collective_rpc("load_staged_weights", args=(self._staged.path, rows))
        except EngineDeadError:
            raise EngineDead() from None

    def load(self) -> EngineLoad:
        stats = self._steps.last_stats
        if not any(tokens.live_ids for tokens in self._running.values()):
            return EngineLoad(0, 0, 0.0, self._steps.count)  # no step reports that the last request was aborted
        waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        return EngineLoad(stats.num_running_reqs, waiting, stats.kv_cache_usage, self._steps.count)

    async def connected(self) -> None:
        """Returns when the engine's process has answered once. Raises EngineDead."""
        try:
            await self._llm.get_supported_tasks()
        except EngineDeadError:
            raise EngineDead() from None

    async def died(self) -> None:
        """Returns when the engine's process is gone though nobody closed it."""
        self._llm._run_output_handler()
        await asyncio.wait((self._llm.output_handler,))
        if self._is_closing:
            await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        self._is_closing = True
        self._llm.shutdown(timeout=self._shutdown_timeout_s)
        self._llm.shutdown = lambda timeout=None: None  # its destructor calls it again when modules are gone
        self._staged.close()

    async def _submit(self, tokens: RequestTokens) -> None:
        request = tokens.request
        tasks = await self._llm.get_supported_tasks()
        prompt = tokens_input(request.prompt_token_ids.tolist(), cache_salt=request.cache_salt)
        self._llm._run_output_handler()
        for sample in tokens.samples:
            if tokens.ending is not None:  # aborted between two samples
                sample.end(tokens.ending)
                continue
            params = vllm_sampling(
                request.sampling, sample_index=sample.index, eos_token_ids=self.identity.eos_token_ids
            )
            core_request = self._llm.input_processor.process_inputs(
                f"{request.request_id}/{sample.index}", prompt, params, supported_tasks=tasks
            )
            self._llm.input_processor.assign_request_id(core_request)
            sample.engine_id = core_request.request_id
            await self._llm._add_request(core_request, None, None, 0, sample)  # vLLM only calls its `put`

    async def _count_everything(self) -> None:
        # The pause's reply comes after every output made before it, so a mark behind them is the last to be processed.
        self._llm._run_output_handler()
        mark = SchedulerStats()
        seen = self._steps.expect(mark)
        self._llm.engine_core.outputs_queue.put_nowait(EngineCoreOutputs(scheduler_stats=mark))
        await asyncio.wait((seen, self._llm.output_handler), timeout=DRAIN_TIMEOUT_S, return_when="FIRST_COMPLETED")
        if not seen.done():
            raise EngineDead() if self._llm.errored else TimeoutError("vLLM's outputs were not read in 30 s")
