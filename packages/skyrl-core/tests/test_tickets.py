"""Prompts handed out one by one: in the loader's order, none lost, none twice, over epochs and over a checkpoint."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from skyrl.train.data.loader import PromptLoader
from skyrl.train.generator.trajectory import PromptTask
from skyrl.train.sources.tickets import Ticket, Tickets


class Data(list):
    """Ten prompts."""

    key, digest, num_dropped = "data.train_data", "d", 0


def loader() -> PromptLoader:
    rows = Data(PromptTask(str(n), [{"role": "user", "content": str(n)}], "env", {}) for n in range(10))
    return PromptLoader(rows, 4, seed=1)  # two batches an epoch; two prompts of ten are left out


def drained(tickets: Tickets) -> list[Ticket]:
    out = []
    while (ticket := tickets.next()) is not None:
        tickets.used(ticket)
        out.append(ticket)
    return out


def test_they_come_in_the_order_of_a_plain_run_with_the_step_that_would_train_them() -> None:
    plain, tickets = loader(), Tickets(loader(), num_batches=4)
    expected = [(step, task.uid) for step in range(1, 5) for task in plain.next_batch()]
    assert [(t.step, t.task.uid) for t in drained(tickets)] == expected
    assert tickets.all_used and tickets.next() is None


def test_one_that_is_sampled_anew_comes_next_under_another_uid() -> None:
    tickets = Tickets(loader(), num_batches=4)
    first, second = tickets.next(), tickets.next()
    assert first is not None and second is not None
    tickets.again(first)
    again = tickets.next()
    assert again is not None and (again.order, again.attempt) == (first.order, 2)
    assert again.named_task.uid == f"{first.task.uid}#2" and again.named_task.messages == first.task.messages
    assert not tickets.all_used


@pytest.mark.parametrize("seed", range(20))
def test_whatever_ends_first_nothing_is_lost_or_twice_over_checkpoints(seed: int) -> None:
    rng, reader = np.random.default_rng(seed), loader()
    tickets, used, out = Tickets(reader, num_batches=4), Counter(), []
    while not tickets.all_used:
        choice = rng.integers(4)
        if choice == 0 and (ticket := tickets.next()) is not None:
            out.append(ticket)
        elif choice in (1, 2) and out:
            ticket = out.pop(rng.integers(len(out)))
            if choice == 1:
                tickets.used(ticket)
                used[ticket.order] += 1
            else:
                tickets.again(ticket)
        elif choice == 3:  # the run is killed and resumed: what was on its way is gone
            state, position, reader, out = tickets.state(), reader.state_dict(), loader(), []
            reader.load_state_dict(position)
            tickets = Tickets(reader, num_batches=4)
            tickets.load(state)
    assert len(used) == 16 and set(used.values()) == {1}


def test_a_prompt_that_the_data_does_not_have_is_named() -> None:
    tickets = Tickets(SimpleNamespace(dataset=loader().dataset), num_batches=1)
    with pytest.raises(ValueError, match=r"prompt 99 of the checkpoint is not in data\.train_data"):
        tickets.load([["99", 1, 0, 1]])
