"""What a group costs with its prompt computed once and n times, whether that pays, and how work is cut by that cost.

Costs are in tokens: the work of one token in a layer's matrices is 1, one attention pair is `k`. Forward and backward
scale alike, and so does every layer, so ratios need neither.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WORTH_IT = 1.15
"""The predicted speed-up above which prompts are shared."""


@dataclass(frozen=True)
class Shape:
    """A group's lengths in tokens."""

    prompt_len: int
    response_lens: tuple[int, ...]

    @property
    def tokens_apart(self) -> int:
        """T0 = sum of (P + R_i)."""
        return sum(self.prompt_len + r for r in self.response_lens)

    @property
    def tokens_shared(self) -> int:
        """T1 = P + sum of R_i."""
        return self.prompt_len + sum(self.response_lens)

    @property
    def pairs_apart(self) -> float:
        """A0 = sum of (P + R_i)^2 / 2."""
        return sum((self.prompt_len + r) ** 2 / 2 for r in self.response_lens)

    @property
    def pairs_shared(self) -> float:
        """A1 = P^2 / 2 + sum of (R_i P + R_i^2 / 2)."""
        return self.prompt_len**2 / 2 + sum(r * self.prompt_len + r**2 / 2 for r in self.response_lens)

    def cost_apart(self, k: float) -> float:
        return self.tokens_apart + k * self.pairs_apart

    def cost_shared(self, k: float) -> float:
        return self.tokens_shared + k * self.pairs_shared


def pair_cost(config: Any) -> float:
    """k = 4 H D FLOPs of an attention pair over the FLOPs of a token in one layer's matrices, 2 per weight that it
    meets; `config` is that of a covered transformers model. Of a mixture a token meets its own experts and the router.
    """
    hidden, heads = config.hidden_size, config.num_attention_heads
    size = getattr(config, "head_dim", None) or hidden // heads
    attention = 2 * hidden * size * (heads + config.num_key_value_heads)
    experts = getattr(config, "num_experts", 0)
    if experts:
        mlp = 3 * hidden * config.moe_intermediate_size * config.num_experts_per_tok + hidden * experts
    else:
        mlp = 3 * hidden * config.intermediate_size
    return 4 * heads * size / (2 * (attention + mlp))


def predicted_speedup(shapes: Sequence[Shape], k: float) -> float:
    """S = (T0 + k A0) / (T1 + k A1), each summed over the groups; 1.0 of none. The LM head, which sees response tokens
    only either way, is not in it."""
    shared = sum(shape.cost_shared(k) for shape in shapes)
    return sum(shape.cost_apart(k) for shape in shapes) / shared if shared else 1.0


def pays(shapes: Sequence[Shape], k: float) -> bool:
    """Whether prompts of these groups are worth sharing."""
    return predicted_speedup(shapes, k) > WORTH_IT


@dataclass(frozen=True)
class Part:
    """Some members of one group, by their index among the members, in order."""

    group: int
    members: tuple[int, ...]


def micro_batches(shapes: Sequence[Shape], budget: float, k: float) -> list[list[Part]]:
    """Parts of groups per micro-batch, whose costs add up to at most `budget` (tokens); dearest first, each into the
    first micro-batch that has room. A group above the budget is split, at one more copy of its prompt per part.

    ValueError for a single response that is above it with its prompt.
    """
    parts = [part for index, shape in enumerate(shapes) for part in _split(index, shape, budget, k)]
    costs = {part: part_cost(shapes, part, k) for part in parts}
    out: list[list[Part]] = []
    left: list[float] = []
    for part in sorted(parts, key=lambda p: (-costs[p], p.group, p.members)):
        place = next((i for i, room in enumerate(left) if costs[part] <= room), len(out))
        if place == len(out):
            out.append([])
            left.append(budget)
        out[place].append(part)
        left[place] -= costs[part]
    return out


def part_cost(shapes: Sequence[Shape], part: Part, k: float) -> float:
    """T1 + k A1 of the part, with a copy of the prompt for itself."""
    shape = shapes[part.group]
    return Shape(shape.prompt_len, tuple(shape.response_lens[m] for m in part.members)).cost_shared(k)


def balanced(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Which micro-batches each rank takes: dearest first to the rank with the least so far, ties to the lower rank."""
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0.0, rank) for rank in range(num_ranks)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = heapq.heappop(loads)
        ranks[rank].append(index)
        heapq.heappush(loads, (load + costs[index], rank))
    return ranks


def even(ranks: Sequence[Sequence[int]]) -> list[list[int | None]]:
    """The same with None, an empty micro-batch, where a rank has fewer than another: collectives need equal counts."""
    longest = max((len(own) for own in ranks), default=0)
    return [[*own, *[None] * (longest - len(own))] for own in ranks]


def _split(index: int, shape: Shape, budget: float, k: float) -> list[Part]:
    """Consecutive members while they fit."""
    parts: list[Part] = []
    members: tuple[int, ...] = ()
    for member, length in enumerate(shape.response_lens):
        alone = Shape(shape.prompt_len, (length,)).cost_shared(k)
        if alone > budget:
            raise ValueError(
                f"a prompt of {shape.prompt_len} tokens with a response of {length} costs {alone:.0f} tokens, the "
                f"budget of a micro-batch is {budget:.0f}: raise trainer.max_tokens_per_microbatch"
            )
        longer = (*members, member)
        if members and part_cost([shape], Part(0, longer), k) > budget:
            parts.append(Part(index, members))
            longer = (member,)
        members = longer
    return [*parts, Part(index, members)] if members else parts
