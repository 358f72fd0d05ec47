"""Episodes as one sample a turn (`generator.step_wise_trajectories`): a prompt is all that came before, token by token.

A generator of one's own may leave such steps itself, as several trajectories of one id in order, also where a turn does
not continue the tokens of the one before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from skyrl.train.generator.trajectory import Trajectory

PER_TOKEN = ("response_token_ids", "loss_mask", "rewards", "rollout_logprobs", "weight_versions")


def steps_of(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Each turn as a trajectory of its own, the turns of an episode one after another under its id.

    A step's response is what the policy sampled in that turn; observations are part of later prompts. Rewards, masks,
    logprobs and versions stay with their tokens.
    """
    return [step for t in trajectories for step in _steps(t)]


def merged(steps: Sequence[Trajectory]) -> list[Trajectory]:
    """Neighbours of one id joined where the later prompt begins with all the earlier one has: one sample, whose tokens
    in between are not trained on."""
    out: list[Trajectory] = []
    for step in steps:
        if out and out[-1].id == step.id and (between := _continued(out[-1], step)) is not None:
            out[-1] = _joined(out[-1], between, step)
        else:
            out.append(step)
    return out


def counts(steps: Sequence[Trajectory], samples: Sequence[Trajectory]) -> dict[str, float]:
    """How many sequences merging made of how many."""
    return {
        "generate/num_seq_before_merge": float(len(steps)),
        "generate/num_seq_after_merge": float(len(samples)),
    }


def _steps(t: Trajectory) -> Iterator[Trajectory]:
    if len(t.turn_num_tokens) < 2:
        yield t
        return
    at = 0
    for num_tokens in t.turn_num_tokens:
        # what was not sampled has no version; a filter may have masked what was
        at += int(np.argmax(t.weight_versions[at:] >= 0))
        turn = slice(at, at + num_tokens)
        yield replace(
            t,
            prompt_token_ids=np.concatenate([t.prompt_token_ids, t.response_token_ids[:at]]),
            **{name: getattr(t, name)[turn] for name in PER_TOKEN},
            num_turns=1,
            turn_num_tokens=(num_tokens,),
        )
        at += num_tokens


def _continued(first: Trajectory, second: Trajectory) -> np.ndarray | None:
    """What `second`'s prompt has after all of `first`; None where it does not begin with that."""
    whole = np.concatenate([first.prompt_token_ids, first.response_token_ids])
    if len(second.prompt_token_ids) < len(whole):
        return None
    return (
        second.prompt_token_ids[len(whole) :] if np.array_equal(second.prompt_token_ids[: len(whole)], whole) else None
    )


def _joined(first: Trajectory, between: np.ndarray, second: Trajectory) -> Trajectory:
    n = len(between)
    fill = {
        "response_token_ids": between,
        "loss_mask": np.zeros(n, np.float32),
        "rewards": np.zeros(n, np.float32),
        "rollout_logprobs": np.zeros(n, np.float32),
        "weight_versions": np.full(n, -1, np.int64),
    }
    return replace(
        second,
        prompt_token_ids=first.prompt_token_ids,
        **{name: np.concatenate([getattr(first, name), fill[name], getattr(second, name)]) for name in PER_TOKEN},
        num_turns=first.num_turns + second.num_turns,
        turn_num_tokens=(*first.turn_num_tokens, *second.turn_num_tokens),
    )
