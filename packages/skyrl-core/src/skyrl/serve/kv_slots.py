"""Keys and values of the running rows, a slot each: rows of any length side by side, with no padding to move about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache

BLOCK_TOKENS = 64  # widths grow by this much, so that attention sees few different shapes


def rounded(tokens: int) -> int:
    """The width that holds so many tokens."""
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS


@dataclass(frozen=True)
class Places:
    """Where the columns of one model call [R, Q] go, and what they may attend to.

    slots: int64 [R]. positions_RQ: int64, -1 for padding, which stands on the left. width: keys that are attended to.
    """

    slots: Sequence[int]
    positions_RQ: torch.Tensor
    width: int


class KvSlots(Cache):
    """Implements the part of `transformers.Cache` that a forward pass with an explicit mask calls.

    The layout is [slot, head, position, feature] per layer. `aim` says what the next forward pass writes and reads.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._stores: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._num_slots, self._width = 0, 0
        self._read: slice | torch.Tensor = slice(0, 0)
        self._used = 0

    @property
    def num_slots(self) -> int:
        return self._num_slots

    @property
    def width(self) -> int:
        """How many tokens each slot holds."""
        return self._width

    @property
    def capacity_tokens(self) -> int:
        """What memory is held for."""
        return self._num_slots * self._width

    def fit(self, num_slots: int, tokens: int) -> None:
        """Makes room for rows of so many tokens; what the slots hold is kept."""
        if num_slots <= self._num_slots and tokens <= self._width:
            return
        self._num_slots, self._width = max(num_slots, self._num_slots), max(rounded(tokens), self._width)
        for layer, (keys, values) in enumerate(self._stores):
            self._stores[layer] = (self._grown(keys), self._grown(values))

    def shrink(self, num_slots: int, tokens: int) -> None:
        """Gives memory back, as far as rows of so many tokens need it."""
        self._num_slots, self._width = num_slots, rounded(tokens)
        for layer, (keys, values) in enumerate(self._stores):
            cut = (slice(num_slots), slice(None), slice(self._width))
            self._stores[layer] = (keys[cut].clone(), values[cut].clone())

    def clear(self) -> None:
        """Frees everything."""
        self._stores.clear()
        self._num_slots, self._width = 0, 0

    def aim(self, places: Places) -> None:
        """The next forward pass is for these places."""
        device = places.positions_RQ.device
        slots = torch.tensor(places.slots, device=device)
        first, count = places.slots[0], len(places.slots)
        contiguous = list(places.slots) == list(range(first, first + count))
        self._read = slice(first, first + count) if contiguous else slots
        self._used = places.width
        self._valid_RQ = places.positions_RQ >= 0
        self._all_valid = bool(self._valid_RQ.all())
        rows_RQ = slots[:, None].expand_as(places.positions_RQ)
        self._at_slot, self._at_position = rows_RQ[self._valid_RQ], places.positions_RQ[self._valid_RQ]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by every attention layer with its new keys and values [R, heads, Q, features]."""
        if layer_idx == len(self._stores):
            self._stores.append((self._empty(key_states), self._empty(value_states)))
        stores = self._stores[layer_idx]
        for store, states in zip(stores, (key_states, value_states), strict=True):
            columns = states.transpose(1, 2)
            picked = columns.flatten(0, 1) if self._all_valid else columns[self._valid_RQ]
            store[self._at_slot, :, self._at_position] = picked
        keys, values = (store[self._read][:, :, : self._used] for store in stores)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are always given

    def wipe(self, slot: int) -> None:
        """Before a new row: a masked key still counts where the value beside it is not finite."""
        for keys, values in self._stores:
            keys[slot].zero_()
            values[slot].zero_()

    def move(self, source: int, target: int, tokens: int) -> None:
        """Copies the first tokens of a slot to another one."""
        for keys, values in self._stores:
            keys[target, :, :tokens] = keys[source, :, :tokens]
            values[target, :, :tokens] = values[source, :, :tokens]

    def take(self, slot: int, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies of the first tokens of a slot, per layer keys and values [heads, tokens, features]."""
        return [(keys[slot, :, :tokens].clone(), values[slot, :, :tokens].clone()) for keys, values in self._stores]

    def put(self, slot: int, copies: list[tuple[torch.Tensor, torch.Tensor]], tokens: int) -> None:
        """Writes the first tokens of what `take` gave."""
        if not self._stores:
            self._stores = [(self._empty(keys[None]), self._empty(values[None])) for keys, values in copies]
        for (keys, values), (own_keys, own_values) in zip(self._stores, copies, strict=True):
            keys[slot, :, :tokens] = own_keys[:, :tokens]
            values[slot, :, :tokens] = own_values[:, :tokens]

    def _empty(self, states: torch.Tensor) -> torch.Tensor:
        return states.new_zeros(self._num_slots, states.shape[1], self._width, states.shape[3])

    def _grown(self, old: torch.Tensor) -> torch.Tensor:
        new = old.new_zeros(self._num_slots, old.shape[1], self._width, old.shape[3])
        new[: old.shape[0], :, : old.shape[2]] = old
        return new
