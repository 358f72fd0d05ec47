"""The server kit's Engine on vLLM's AsyncLLM: generate, pause, swap weights, and exact counts of tokens made.

It leaves out `AsyncLLM.generate` and hands vLLM's output handler its own queue per sample, because that queue sees
every engine step at once and in order, however slowly anybody reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

from skyrl_rollout.errors import WrongState
from skyrl_rollout.server.engine import (
    Adapter,
    CollectiveTransfer,
    EngineLoad,
    EngineRequest,
    EngineScoreRequest,
    ModelIdentity,
    PlainEngine,
    PromptRead,
    SampleEnded,
    TokensMade,
    TokensScored,
)
from skyrl_rollout.tokens import FinishReason
from skyrl_rollout.weights.manifest import TensorLayout
from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.stats import SchedulerStats

from skyrl_arctic_inference.engine.adapters import AdapterBook, adapter_sizes
from skyrl_arctic_inference.engine.capabilities import capabilities_of
from skyrl_arctic_inference.engine.core_calls import HELD
from skyrl_arctic_inference.engine.dead import EngineDead
from skyrl_arctic_inference.engine.identity import ModelFolder
from skyrl_arctic_inference.engine.logprobs import refuse_inexact
from skyrl_arctic_inference.engine.sampling import refuse_changed, vllm_sampling
from skyrl_arctic_inference.engine.scoring import Score
from skyrl_arctic_inference.engine.spans import prompt_span, refuse_inexact_prompt, refuse_inexact_score
from skyrl_arctic_inference.engine.staged_bytes import StagedBytes
from skyrl_arctic_inference.engine.steps import StepObserver
from skyrl_arctic_inference.engine.streams import RequestTokens, SampleTokens
from skyrl_arctic_inference.settings import SPARE_LORA_SLOTS

DRAIN_TIMEOUT_S = 30.0
MEET_TIMEOUT_S = 5.0
GPU_SHUTDOWN_TIMEOUT_S = 5.0  # a killed process on a CPU leaves nothing to give back
SLEEP_LEVELS = {"offload": 1, "discard": 2}
DTYPES = {"torch.float32": "f32", "torch.float16": "f16", "torch.bfloat16": "bf16"}


class VllmEngine(PlainEngine):
    """See `skyrl_rollout.server.engine.Engine`. Made by `engine.launch.start_engine`, before the event loop runs."""

    def __init__(
        self, llm: AsyncLLM, steps: StepObserver, folder: ModelFolder, *, on_cpu: bool, offers_gloo: bool
    ) -> None:
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
        self.capabilities = capabilities_of(
            llm.vllm_config, on_cpu=on_cpu, has_tokenizer=folder.has_tokenizer, offers_gloo=offers_gloo
        )
        self._llm = llm
        self._steps = steps
        self._staged = StagedBytes()
        self._eos = frozenset(folder.eos_token_ids)
        self._running: dict[str, RequestTokens] = {}
        self._scores: set[Score] = set()
        self._adapters = AdapterBook({}, max_adapters=0, max_rank=0, dtype=dtype)
        self._incoming: dict[str, Any] = {}
        self._is_closing = False
        self._is_on_cpu = on_cpu
        self._shutdown_timeout_s = 0.0 if on_cpu else GPU_SHUTDOWN_TIMEOUT_S

    def check(self, request: EngineRequest) -> None:
        """Raises ValueError for what vLLM would change, approximate, or crash on."""
        refuse_changed(request.sampling, vocab_size=self.identity.vocab_size)
        refuse_inexact(request.mode, request.sampling)
        refuse_inexact_prompt(request)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[PromptRead | TokensMade | SampleEnded, None]:
        """Yields what every sample makes. Raises EngineDead when the engine's process is gone."""
        tokens = RequestTokens(request, self._eos)
        self._running[request.request_id] = tokens
        try:
            await self._submit(tokens)
            while True:
                tokens.ready.clear()
                for item in tokens.drain():
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

    def extra_nbytes(self, nbytes: int) -> int:
        """The staged bytes, which the engine's processes map, are a copy; the next update of this size reuses it."""
        return self._staged.missing(nbytes)

    async def load_weights(self, tensors: Iterator[tuple[TensorLayout, memoryview]]) -> None:
        """Stages the bytes where the engine's processes can map them, then swaps. Raises RuntimeError with the worker's
        reason when the model is unusable now."""
        staged = await asyncio.to_thread(self._staged.fill, tensors)
        await self._call_workers("load_staged_weights", self._staged.path, [t.as_row() for t in staged])

    def check_score(self, request: EngineScoreRequest) -> None:
        """Raises ValueError for a temperature that is out of range; every mode is exact, for nothing is drawn."""
        refuse_inexact_score(request)

    async def score(self, request: EngineScoreRequest) -> AsyncGenerator[TokensScored, None]:
        """Yields the positions of one forward pass in order. Raises EngineDead, or Paused where a pause ended it."""
        score = Score(request)
        self._scores.add(score)
        try:
            await self._submit_one(
                request.request_id, score, score.prompt_token_ids, score.sampling(), request.cache_salt,
                policy_id=request.policy_id,
            )  # fmt: skip
            await score.done.wait()
            for item in score.rows():
                yield item
        except EngineDeadError:
            raise EngineDead() from None
        finally:
            self._scores.discard(score)
            if score.engine_id and not score.done.is_set():
                await self._llm.abort([score.engine_id], internal=True)

    async def reset_cache(self, *, preempt_running: bool) -> int:
        """Returns the blocks freed. Raises WrongState where running requests hold blocks and may not be preempted."""
        try:
            freed = await self._llm.engine_core.call_utility_async("drop_cached_blocks", preempt_running)
        except EngineDeadError:
            raise EngineDead() from None
        if freed == HELD:
            raise WrongState(
                "running requests hold KV blocks, so the cache was not reset: wait until they have ended, pause with "
                "abort, or preempt them"
            )
        return int(freed)

    async def sleep(self, level: str) -> int:
        """Returns the accelerator bytes that were freed, over all workers."""
        await self.reset_cache(preempt_running=False)
        return sum(await self._call_workers("sleep_and_count", SLEEP_LEVELS[level]))

    async def wake_up(self, *, weights: bool, kv_cache: bool) -> None:
        tags = [tag for tag, wanted in (("weights", weights), ("kv_cache", kv_cache)) if wanted]
        if tags:
            await self._call_workers("wake_up", tags)

    def check_adapter(self, adapter: Adapter, tensors: Sequence[TensorLayout]) -> None:
        """Raises ValueError for a rank, module or tensor that this model cannot take."""
        self._adapters.check(adapter, tensors)

    async def load_adapter(self, adapter: Adapter, tensors: Iterator[tuple[TensorLayout, memoryview]]) -> None:
        """Loads or replaces an adapter in memory; nothing is written to a disk."""
        staged = await asyncio.to_thread(self._staged.fill, tensors)
        rows = [t.as_row() for t in staged]
        number = self._adapters.number(adapter.policy_id)
        await self._call_workers("load_staged_adapter", number, adapter.rank, adapter.alpha, self._staged.path, rows)

    async def drop_adapter(self, policy_id: str) -> None:
        if (number := self._adapters.forget(policy_id)) is not None:
            await self._call_workers("drop_adapter", number)

    async def join(self, transfer: CollectiveTransfer, tensors: Sequence[TensorLayout]) -> None:
        """Meets the trainer. Raises ConnectionError or TimeoutError, with the address, where nobody listens."""
        if transfer.master_addr:
            await refuse_silence(transfer.master_addr, transfer.master_port)
        meeting = {
            "master_addr": transfer.master_addr, "master_port": transfer.master_port,
            "world_size": transfer.world_size, "rank_offset": transfer.rank_offset,
        }  # fmt: skip
        await self._call_workers("join_transfer", transfer.backend, meeting)
        rows = [(t.name, t.dtype, list(t.shape)) for t in tensors]
        self._incoming = {"rows": rows, "handles": {n: list(h) for n, h in transfer.handles.items()}}

    async def receive(self) -> None:
        await self._call_workers("receive_transfer", self._incoming)

    async def leave(self) -> None:
        await self._call_workers("leave_transfer")

    def load(self) -> EngineLoad:
        stats = self._steps.last_stats
        submitted = len(self._scores) + sum(len(tokens.live_ids) for tokens in self._running.values())
        if not submitted:
            return EngineLoad(0, 0, 0.0, self._steps.count)  # no step reports that the last request was aborted
        waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        # nor that the first has come: an engine that stands still would look idle
        waiting = max(waiting, submitted - stats.num_running_reqs)
        return EngineLoad(stats.num_running_reqs, waiting, stats.kv_cache_usage, self._steps.count)

    async def connected(self) -> None:
        """Returns when the engine's processes have answered and are ready for every call. Raises EngineDead."""
        if self.capabilities.score:
            await self._call_workers("compute_given_logprobs")
        if self.capabilities.lora:
            config = self._llm.vllm_config.lora_config
            modules = (await self._call_workers("adapter_modules"))[0]
            self._adapters = AdapterBook(
                adapter_sizes(modules, self.identity.tensors),
                max_adapters=config.max_loras - SPARE_LORA_SLOTS["cpu" if self._is_on_cpu else "cuda"],
                max_rank=config.max_lora_rank,
                dtype=self.identity.dtype,
            )
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
        prompt = prompt_span(request)
        for sample in tokens.samples:
            if tokens.ending is not None:  # aborted between two samples
                sample.end(tokens.ending)
                continue
            params = vllm_sampling(
                request, sample_index=sample.index, eos_token_ids=self.identity.eos_token_ids, prompt=prompt
            )
            await self._submit_one(
                f"{request.request_id}/{sample.index}", sample, request.prompt_token_ids.tolist(), params,
                request.cache_salt, policy_id=request.policy_id, priority=request.priority,
            )  # fmt: skip

    async def _submit_one(
        self,
        name: str,
        reader: SampleTokens | Score,
        token_ids: list[int],
        params: SamplingParams,
        cache_salt: str,
        *,
        policy_id: str,
        priority: int = 0,
    ) -> None:
        core_request = self._llm.input_processor.process_inputs(
            name,
            tokens_input(token_ids, cache_salt=cache_salt),
            params,
            supported_tasks=await self._llm.get_supported_tasks(),
            lora_request=self._lora(policy_id),
            priority=-priority,  # vLLM's first is the lowest
        )
        self._llm._run_output_handler()
        self._llm.input_processor.assign_request_id(core_request)
        reader.engine_id = core_request.request_id
        await self._llm._add_request(core_request, None, None, 0, reader)  # vLLM only calls its `put`

    def _lora(self, policy_id: str) -> LoRARequest | None:
        # vLLM wants a path; it would be read for an adapter that is not loaded, and that never runs
        return LoRARequest(policy_id, self._adapters.loaded(policy_id), "in-memory") if policy_id else None

    async def _call_workers(self, method: str, *args: Any) -> list[Any]:
        """What the method of `WorkerExtension` returns in every worker."""
        try:
            return await self._llm.collective_rpc(method, args=args)
        except EngineDeadError:
            raise EngineDead() from None

    async def _count_everything(self) -> None:
        # The pause's reply comes after every output made before it, so a mark behind them is the last to be processed.
        self._llm._run_output_handler()
        mark = SchedulerStats()
        seen = self._steps.expect(mark)
        self._llm.engine_core.outputs_queue.put_nowait(EngineCoreOutputs(scheduler_stats=mark))
        await asyncio.wait((seen, self._llm.output_handler), timeout=DRAIN_TIMEOUT_S, return_when="FIRST_COMPLETED")
        if not seen.done():
            raise EngineDead() if self._llm.errored else TimeoutError("vLLM's outputs were not read in 30 s")


async def refuse_silence(host: str, port: int) -> None:
    """Raises ConnectionError where nobody listens: a worker that waited for a trainer would stop every request."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), MEET_TIMEOUT_S)
    except (OSError, TimeoutError) as error:
        reason = str(error) or "no answer"
        raise ConnectionError(f"the trainer does not listen at {host}:{port} ({reason}): open its end first") from None
    writer.close()
