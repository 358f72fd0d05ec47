"""What computing a group's prompt once brings: forward and backward against separate rows, over what is predicted.

One group at a time, on a Qwen3 decoder of four layers with random weights, one thread, float32, the same LM head code
and the same loss both ways, in turns. Seconds are CPU seconds, which on one thread are those of an idle machine's clock
and do not count other processes' turns. Peak memory is that of one pass in a process of its own. Bounds: measured over
predicted; the logprobs agree; where nothing is predicted to be gained, separate rows are chosen.
"""

import ctypes
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from arctic_rl.shared_prefix import forward
from arctic_rl.shared_prefix.cost import WORTH_IT, Shape, pair_cost, pays, predicted_speedup
from arctic_rl.shared_prefix.logits import chunked_logprobs, plain_head
from skyrl.train.policy.batch import TrajectoryBatch
from skyrl.train.policy.fsdp.rows import to_rows
from transformers import Qwen3Config, Qwen3ForCausalLM

from benches.report import Figure, Report, versions_here

AT_LEAST = 0.9
VOCABULARY = 1024
BUDGET_BYTES = 2**26
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """P prompt tokens, R tokens in each of n responses."""

    p: int
    r: int
    n: int

    @property
    def name(self) -> str:
        return f"{self.p}/{self.r}/{self.n}"

    @property
    def shape(self) -> Shape:
        return Shape(self.p, (self.r,) * self.n)


CASES = (Case(512, 32, 8), Case(512, 128, 8), Case(256, 256, 8), Case(1024, 64, 8))
NOT_WORTH_IT = (Case(32, 512, 4), Case(512, 128, 1))
"""Short prompt and long responses; a group of one."""


async def measure(small: bool) -> Report:
    """Speed-up, predicted speed-up and peak memory per case."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cases, rounds = ((Case(64, 8, 4),), 1) if small else (CASES, 7)
    model = decoder(small)
    figures: list[Figure] = []
    found: list[dict[str, Any]] = []
    for case in cases:
        row = measure_case(model, case, rounds)
        found.append(row)
        figures += figures_of(case, row)
    k = pair_cost(model.config)
    for case in NOT_WORTH_IT:
        chosen_apart = float(not pays([case.shape], k))
        figures.append(Figure(f"{case.name}: separate rows are chosen", chosen_apart, "1 = yes", at_least=1.0))
    settings = {
        "layers": model.config.num_hidden_layers,
        "width": model.config.hidden_size,
        "threads": 1,
        "rounds": rounds,
    }
    settings |= {"dtype": "float32", "vocabulary": VOCABULARY, "shared above": WORTH_IT}
    return Report("shared-prefix", figures, settings, not small, versions_here(), cases=found)


def decoder(small: bool) -> Any:
    """Four layers of width 256; in small two of width 32."""
    width, layers, heads = (32, 2, 4) if small else (256, 4, 4)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=width // heads,
        max_position_embeddings=4096,
    )
    model = Qwen3ForCausalLM(config).train()
    forward.prepare(model)
    return model


def group(case: Case) -> TrajectoryBatch:
    """One group of random tokens."""
    prompt = torch.randint(0, VOCABULARY, (case.p,))
    sequences = [torch.cat([prompt, torch.randint(0, VOCABULARY, (case.r,))]) for _ in range(case.n)]
    zeros_T = torch.zeros(case.n * case.r)
    return TrajectoryBatch(
        token_ids_N=torch.cat(sequences),
        seq_lens_S=torch.full((case.n,), case.p + case.r),
        prompt_lens_S=torch.full((case.n,), case.p),
        group_ids_S=torch.zeros(case.n, dtype=torch.int64),
        loss_mask_T=zeros_T + 1,
        rewards_T=zeros_T,
        rollout_logprobs_T=zeros_T,
        weight_versions_T=zeros_T.long(),
    )


def shared(model: Any, batch: TrajectoryBatch) -> torch.Tensor:
    """Logprobs with the prompt computed once."""
    return forward.token_logprobs(model, batch, temperature=1.0, with_entropy=False, budget_bytes=BUDGET_BYTES)[0]


def apart(model: Any, batch: TrajectoryBatch) -> torch.Tensor:
    """Logprobs of the separate rows, with the LM head on the same places."""
    rows = to_rows(batch)
    hidden_BLD = model.get_decoder()(input_ids=rows.input_ids_BL, use_cache=False).last_hidden_state
    return chunked_logprobs(
        hidden_BLD.flatten(0, 1)[rows.predictors_T],
        plain_head(model.get_output_embeddings()),
        rows.labels_T,
        temperature=1.0,
        with_entropy=False,
        budget_bytes=BUDGET_BYTES,
    )[0]


WAYS: dict[str, Callable[[Any, TrajectoryBatch], torch.Tensor]] = {"apart": apart, "shared": shared}


def measure_case(model: Any, case: Case, rounds: int) -> dict[str, Any]:
    """Both ways in turns after one pass of each to warm up: medians of seconds, of the ratio in each round, and MiB."""
    batch = group(case)
    with torch.no_grad():
        off = float((apart(model, batch) - shared(model, batch)).abs().max())
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for way in sorted(WAYS, reverse=bool(number % 2)):
            start = time.process_time()
            step(model, batch, way)
            if number:
                seconds[way].append(time.process_time() - start)
    predicted = predicted_speedup([case.shape], pair_cost(model.config))
    measured = statistics.median(a / s for a, s in zip(seconds["apart"], seconds["shared"], strict=True))
    row: dict[str, Any] = {"p": case.p, "r": case.r, "n": case.n, "measured": measured, "predicted": predicted}
    row["logprobs_off"] = off
    for way in WAYS:
        row[f"{way}_s"] = statistics.median(seconds[way])
        row[f"{way}_peak_mib"] = peak_mib(model, batch, way)
    return row


def step(model: Any, batch: TrajectoryBatch, way: str) -> None:
    """Forward and backward, gradients dropped."""
    model.zero_grad(set_to_none=True)
    WAYS[way](model, batch).sum().backward()
    model.zero_grad(set_to_none=True)


def figures_of(case: Case, row: Mapping[str, Any]) -> list[Figure]:
    """One case's numbers with their bounds."""
    return [
        Figure(f"{case.name}: measured", row["measured"], "x"),
        Figure(f"{case.name}: predicted", row["predicted"], "x"),
        Figure(f"{case.name}: measured over predicted", row["measured"] / row["predicted"], "", at_least=AT_LEAST),
        Figure(f"{case.name}: separate rows", row["apart_s"] * 1e3, "ms"),
        Figure(f"{case.name}: prompt once", row["shared_s"] * 1e3, "ms"),
        Figure(f"{case.name}: peak memory, separate rows", row["apart_peak_mib"], "MiB"),
        Figure(f"{case.name}: peak memory, prompt once", row["shared_peak_mib"], "MiB"),
        Figure(f"{case.name}: largest difference of a logprob", row["logprobs_off"], "", at_most=1e-5),
    ]


def peak_mib(model: Any, batch: TrajectoryBatch, way: str) -> float:
    """What one pass adds at its peak to the resident memory of a process of its own."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_report_peak, args=(theirs, model, batch, way))
    child.start()
    theirs.close()
    try:
        if not ours.poll(120.0):
            raise TimeoutError(f"the pass whose memory is measured ({way}) did not end within 120 s")
        return float(ours.recv()) / MIB
    finally:
        child.join(10.0)
        if child.is_alive():
            child.kill()


def _report_peak(answer: Connection, model: Any, batch: TrajectoryBatch, way: str) -> None:
    # the code that both ways run is read in before, or it would count
    step(model, group(Case(2, 2, 2)), way)
    # what earlier passes freed lies in the allocator, where this one would take it without being seen
    ctypes.CDLL(None).malloc_trim(0)
    before = resident_bytes("VmRSS")
    # 5: the peak starts again from what is resident now
    Path("/proc/self/clear_refs").write_text("5")
    step(model, batch, way)
    answer.send(resident_bytes("VmHWM") - before)
    os._exit(0)


def resident_bytes(field: str) -> int:
    """VmRSS (now) or VmHWM (at most so far) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise LookupError(f"/proc/self/status has no {field}")
