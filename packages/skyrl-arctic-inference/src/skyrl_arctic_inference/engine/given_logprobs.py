"""Logprobs of given tokens inside a vLLM worker: over the full vocabulary, only for the positions that were asked for.

vLLM's own pass covers every position of the prompt, knows no temperature, and a prompt that fills the context is
refused before it. A request says in `SamplingParams.extra_args` what it wants instead: see `spans.GivenSpan`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors

from skyrl_arctic_inference.engine.spans import GivenSpan

POSITIONS_PER_BLOCK = 256  # logits of so many positions exist at a time: 150k tokens of vocabulary are 150 MB then


class GivenLogprobs:
    """Methods that `collective_rpc` calls by name in every worker."""

    model_runner: Any

    def compute_given_logprobs(self) -> bool:
        """From now on prompt logprobs are those of `GivenSpan`. False for a model runner that has no such pass."""
        if not hasattr(self.model_runner, "_get_prompt_logprobs_dict"):
            return False
        self.model_runner._get_prompt_logprobs_dict = partial(given_logprobs, self.model_runner)
        return True


def given_logprobs(
    runner: Any, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
) -> dict[str, LogprobsTensors | None]:
    """What vLLM calls after every forward pass: request id -> all its rows, for the requests whose prompt is done.

    hidden_states: [tokens of this step, hidden]. Rows: the given token first, then the most probable ones, best first.
    """
    finished: dict[str, LogprobsTensors | None] = {}
    for request_id, num_top in list(runner.num_prompt_logprobs.items()):
        num_computed = num_scheduled_tokens.get(request_id)
        if num_computed is None:  # preempted, or not scheduled in this step
            continue
        request = runner.requests[request_id]
        span = GivenSpan.of(request.sampling_params.extra_args)
        tokens = request.prompt_token_ids + ([span.after] if span.after >= 0 else [])
        if request.in_progress_prompt_logprobs_cpu is None:
            request.in_progress_prompt_logprobs_cpu = LogprobsTensors.empty_cpu(len(tokens) - span.first, num_top + 1)
        rows = request.in_progress_prompt_logprobs_cpu
        begin = request.num_computed_tokens
        end = min(len(tokens), begin + num_computed + 1)
        offset = runner.query_start_loc.np[runner.input_batch.req_id_to_index[request_id]].item() - begin - 1
        for start in range(max(span.first, begin + 1), end, POSITIONS_PER_BLOCK):
            stop = min(start + POSITIONS_PER_BLOCK, end)
            logits = runner.model.compute_logits(hidden_states[offset + start : offset + stop])
            given = torch.tensor(tokens[start:stop], dtype=torch.int64, device=logits.device)
            _fill(rows, start - span.first, runner.sampler, logits.to(torch.float32).div_(span.temperature), given)
        if begin + num_computed >= len(request.prompt_token_ids):
            finished[request_id] = rows
            del runner.num_prompt_logprobs[request_id]
            request.in_progress_prompt_logprobs_cpu = None
    if finished:
        runner._sync_device()
    return finished


def _fill(rows: LogprobsTensors, at: int, sampler: Any, logits: torch.Tensor, given: torch.Tensor) -> None:
    num_top = rows.logprobs.shape[1] - 1
    found = sampler.gather_logprobs(sampler.compute_logprobs(logits), num_top, given)
    place = slice(at, at + len(given))
    rows.logprob_token_ids[place].copy_(found.logprob_token_ids, non_blocking=True)
    rows.logprobs[place].copy_(found.logprobs, non_blocking=True)
    rows.selected_token_ranks[place].copy_(found.selected_token_ranks, non_blocking=True)
