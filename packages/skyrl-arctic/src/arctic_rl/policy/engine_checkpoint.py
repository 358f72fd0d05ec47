"""The training state of a DeepSpeed rank, as the core stores it: which elements of which tensor this rank holds.

Nothing is gathered: every rank writes and reads its own stretch of the float32 weights and of AdamW's moments. ZeRO 0
holds whole tensors, ZeRO 1 and 2 a cut of all parameters laid end to end, ZeRO 3 a cut of each parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from skyrl.train.policy.checkpoint import training_state
from skyrl.train.policy.checkpoint.moments import MOMENTS, set_schedule, set_steps, steps_done, with_moments
from skyrl.train.policy.checkpoint.stretch import Stretch
from skyrl.train.policy.checkpoint.training_state import TrainingState
from skyrl.train.policy.contract import WorkerPlace
from skyrl.train.policy.fsdp.checkpoint import stored_tensors, trained, unique_tensors

from arctic_rl.policy import engine as ds

KINDS = ("weights", *MOMENTS)


@dataclass(frozen=True)
class Held:
    """What this rank holds of the trained parameters.

    `kinds`: kind -> name -> tensor or stretch of one. `owners`: the tensors that the optimizer counts steps of.
    `write_back` makes the model compute with what was loaded.
    """

    kinds: dict[str, dict[str, Any]]
    owners: list[torch.Tensor]
    write_back: Callable[[], None]


def save(folder: Path, place: WorkerPlace, engine: Any) -> None:
    """Everything that training needs to go on (collective)."""
    training_state.save(folder, place, _state(place, engine, _held(place, engine)))


def load(folder: Path, place: WorkerPlace, engine: Any, *, seed: int) -> list[str]:
    """Restores what any number of ranks of any backend saved (collective); see `training_state.load`."""
    held = _held(place, engine)
    found, notes = training_state.load(folder, place, _state(place, engine, held), seed=seed)
    held.write_back()
    steps = max((found.tensors[name].steps or 0 for name in trained(engine.module)), default=0)
    for owner in held.owners:
        set_steps(_optimizer(engine), owner, steps)
    set_schedule(engine.lr_scheduler, found.schedule_steps or 0)
    return notes


def save_weights(folder: Path, place: WorkerPlace, engine: Any) -> None:
    """All weights, trained or not, and nothing else (collective)."""
    training_state.save(folder, place, TrainingState(made_by(engine), {"weights": _weights(place, engine)}))


def load_weights(folder: Path, place: WorkerPlace, engine: Any) -> None:
    """Restores what `save_weights` of any backend wrote (collective)."""
    held = _held(place, engine)
    weights = _frozen(place, engine, dict(unique_tensors(engine.module))) | held.kinds["weights"]
    training_state.load_weights(folder, place, TrainingState(made_by(engine), {"weights": weights}))
    held.write_back()


def made_by(engine: Any) -> str:
    """What `contents.json` says of the writer."""
    return f"arctic_rl, ZeRO {engine.zero_optimization_stage()}"


def _state(place: WorkerPlace, engine: Any, held: Held) -> TrainingState:
    others = _frozen(place, engine, stored_tensors(engine.module))
    steps = steps_done(_optimizer(engine), held.owners[0]) if held.owners else 0
    return TrainingState(
        made_by=made_by(engine),
        tensors=held.kinds | {"weights": others | held.kinds["weights"]},
        steps=dict.fromkeys(held.kinds["weights"], steps),
        schedule_steps=engine.lr_scheduler.last_epoch,
    )


def _weights(place: WorkerPlace, engine: Any) -> dict[str, Any]:
    return _frozen(place, engine, dict(unique_tensors(engine.module))) | _held(place, engine).kinds["weights"]


def _frozen(place: WorkerPlace, engine: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Those of `tensors` that are not trained, as this rank holds them."""
    out: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if not tensor.requires_grad:
            share = getattr(tensor, "ds_tensor", None)
            out[name] = tensor.detach() if share is None else _cut(place, tensor, share)
    return out


def _held(place: WorkerPlace, engine: Any) -> Held:
    parameters = trained(engine.module)
    stage = engine.zero_optimization_stage()
    if stage == 0:
        return _whole(engine, parameters)
    return _shared(place, engine, parameters) if stage == 3 else _laid_end_to_end(engine, parameters)


def _whole(engine: Any, parameters: dict[str, torch.Tensor]) -> Held:
    optimizer = _optimizer(engine)
    with_moments(optimizer, parameters.values())
    kinds: dict[str, dict[str, Any]] = {"weights": {name: tensor.detach() for name, tensor in parameters.items()}}
    for kind in MOMENTS:
        kinds[kind] = {name: optimizer.state[tensor][kind] for name, tensor in parameters.items()}
    return Held(kinds, list(parameters.values()), lambda: None)


def _laid_end_to_end(engine: Any, parameters: dict[str, torch.Tensor]) -> Held:
    optimizer = _optimizer(engine)
    flats = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    with_moments(optimizer, flats)
    kinds: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
    for name, parameter in parameters.items():
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]  # None: all of it is on other ranks
        for kind in KINDS:
            if mapping is None:
                kinds[kind][name] = Stretch(parameter.shape, 0, torch.empty(0))
                continue
            flat = optimizer.param_groups[mapping.param_group_index]["params"][0]
            values = flat.detach() if kind == "weights" else optimizer.state[flat][kind]
            there = mapping.hp_fragment_address
            kinds[kind][name] = Stretch(
                parameter.shape, mapping.lp_fragment_address.start, values.narrow(0, there.start, there.numel)
            )
    return Held(kinds, flats, engine.optimizer.update_lp_params)


def _shared(place: WorkerPlace, engine: Any, parameters: dict[str, torch.Tensor]) -> Held:
    zero, flats = engine.optimizer, list(engine.optimizer.fp32_partitioned_groups_flat)
    with_moments(_optimizer(engine), flats)
    zero.checkpoint_event_prologue()  # parameters that stay gathered between steps are shared out too
    shares = {
        kind: {name: ds.local_share(p, None if kind == "weights" else kind) for name, p in parameters.items()}
        for kind in KINDS
    }
    zero.checkpoint_event_epilogue()

    def write_back() -> None:
        zero.checkpoint_event_prologue()
        for kind, named in shares.items():
            for name, values in named.items():
                ds.set_local_share(parameters[name], None if kind == "weights" else kind, values)
        zero.checkpoint_event_epilogue()

    kinds = {
        kind: {name: _cut(place, parameters[name], values) for name, values in named.items()}
        for kind, named in shares.items()
    }
    return Held(kinds, flats, write_back)


def _cut(place: WorkerPlace, tensor: torch.Tensor, share: torch.Tensor) -> Stretch:
    """A rank's equal share of a parameter (stage 3), without the padding at its end."""
    shape = ds.whole_shape(tensor)
    start = place.rank * share.numel()
    length = max(0, min(share.numel(), torch.Size(shape).numel() - start))
    return Stretch(shape, start, share.detach().view(-1)[:length])


def _optimizer(engine: Any) -> Any:
    """torch's AdamW, which ZeRO wraps."""
    return engine.optimizer if engine.zero_optimization_stage() == 0 else engine.optimizer.optimizer
