"""The random generators of a worker: kept where as many workers go on, drawn anew where there are more or fewer."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from skyrl.train.seeds import derive


def random_state(device: torch.device) -> dict[str, Any]:
    """Of torch, numpy, Python and the device, as tensors and numbers, which the safe unpickler reads."""
    kind, words, *rest = np.random.get_state(legacy=True)
    numpy_state = (kind, torch.from_numpy(np.asarray(words, np.int64)), *rest)
    state = {"torch": torch.get_rng_state(), "numpy": numpy_state, "python": random.getstate()}
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restores what `random_state` returned."""
    torch.set_rng_state(state["torch"])
    kind, words, *rest = state["numpy"]
    np.random.set_state((kind, words.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def draw_random_state(run_seed: int, *, updates: int, rank: int) -> None:
    """Seeds the generators from the run's seed, the number of optimizer steps done, and the rank."""
    seed = derive(run_seed, "resumed worker", updates, rank)
    torch.manual_seed(seed)  # of every device
    np.random.seed(seed % 2**32)
    random.seed(seed)
