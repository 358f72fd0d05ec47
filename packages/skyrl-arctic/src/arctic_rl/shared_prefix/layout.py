"""How the sequences of a batch become one row in which each prompt stands once: `[prompt | r1 | ... | rn]` per group.

Pure index arithmetic; nothing here knows a model. The row has no padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from skyrl.train.policy.batch import TrajectoryBatch


@dataclass(frozen=True)
class Group:
    """One prompt with its responses, somewhere in a packed row. All in tokens; every response has at least one."""

    start: int
    prompt_len: int
    response_lens: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + self.prompt_len + sum(self.response_lens)

    @property
    def prompt(self) -> slice:
        return slice(self.start, self.start + self.prompt_len)

    @property
    def responses(self) -> slice:
        """Where all its responses lie, one after another."""
        return slice(self.start + self.prompt_len, self.end)


@dataclass(frozen=True)
class Layout:
    """The groups of a row, in order and without gaps: all that attention has to know."""

    groups: tuple[Group, ...]

    @property
    def num_tokens(self) -> int:
        return self.groups[-1].end if self.groups else 0


@dataclass(frozen=True)
class Packed:
    """A batch as one row. input_ids_1N and position_ids_1N int64: each response continues at its prompt's length.

    For every response token, in the order of the batch that was packed: predictors_T, the place in the row whose logits
    predict it; labels_T, the token; segment_ids_T, its sequence. The last place of a prompt predicts the first token of
    each of its responses, so a place may stand in predictors_T more than once.
    """

    layout: Layout
    input_ids_1N: torch.Tensor
    position_ids_1N: torch.Tensor
    predictors_T: torch.Tensor
    labels_T: torch.Tensor
    segment_ids_T: torch.Tensor


def groups_of(batch: TrajectoryBatch) -> list[list[int]]:
    """Indices of the sequences that share a prompt, groups and members in order of first appearance.

    Sequences belong together by `group_ids_S`, wherever they stand. Tokens are compared only to part those of one id
    whose prompts differ, as the turns of an episode do; equal prompts of two ids stay two groups.
    """
    starts = (torch.cumsum(batch.seq_lens_S, 0) - batch.seq_lens_S).tolist()
    prompt_lens, tokens = batch.prompt_lens_S.tolist(), batch.token_ids_N.cpu().numpy()
    members: dict[tuple[int, bytes], list[int]] = {}
    for s, group_id in enumerate(batch.group_ids_S.tolist()):
        prompt = tokens[starts[s] : starts[s] + prompt_lens[s]].tobytes()
        members.setdefault((group_id, prompt), []).append(s)
    return list(members.values())


def pack(batch: TrajectoryBatch) -> Packed:
    """The whole batch as one row on its own device. A group of which the batch holds only a part is packed with a
    prompt of its own. ValueError for an empty prompt, whose first response token nothing predicts."""
    if int(batch.prompt_lens_S.min()) < 1:
        raise ValueError("a sequence has an empty prompt: its first response token has no position that predicts it")
    starts = (torch.cumsum(batch.seq_lens_S, 0) - batch.seq_lens_S).tolist()
    prompt_lens, response_lens = batch.prompt_lens_S.tolist(), batch.response_lens_S.tolist()
    groups: list[Group] = []
    taken: list[torch.Tensor] = []
    positions: list[torch.Tensor] = []
    predictors: list[torch.Tensor] = [torch.empty(0, dtype=torch.int64)] * batch.num_sequences
    place = 0
    for members in groups_of(batch):
        first, prompt_len = starts[members[0]], prompt_lens[members[0]]
        lens = tuple(response_lens[s] for s in members if response_lens[s])
        groups.append(Group(place, prompt_len, lens))
        taken.append(torch.arange(first, first + prompt_len))
        positions.append(torch.arange(prompt_len))
        last_of_prompt, place = place + prompt_len - 1, place + prompt_len
        for s in members:
            length, begin = response_lens[s], starts[s] + prompt_len
            taken.append(torch.arange(begin, begin + length))
            positions.append(torch.arange(prompt_len, prompt_len + length))
            predictors[s] = torch.arange(place - 1, place + length - 1)
            predictors[s][:1] = last_of_prompt
            place += length
    device = batch.token_ids_N.device
    return Packed(
        layout=Layout(tuple(groups)),
        input_ids_1N=batch.token_ids_N[torch.cat(taken).to(device)][None],
        position_ids_1N=torch.cat(positions).to(device)[None],
        predictors_T=torch.cat(predictors).to(device),
        labels_T=batch.token_ids_N[_response_places(batch)],
        segment_ids_T=batch.segment_ids_T,
    )


def _response_places(batch: TrajectoryBatch) -> torch.Tensor:
    """[T]: where each response token lies in token_ids_N."""
    starts_S = torch.cumsum(batch.seq_lens_S, 0) - batch.seq_lens_S + batch.prompt_lens_S
    return starts_S[batch.segment_ids_T] + batch.positions_T
