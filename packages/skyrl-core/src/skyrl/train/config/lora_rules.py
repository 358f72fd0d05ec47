"""Which values of `trainer.policy.model.lora.*` can be, and which other keys they exclude."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from skyrl.train.config.idle import Idle
from skyrl.train.config.problems import listed
from skyrl.train.launch import table

L, CRITIC = "trainer.policy.model.lora", "trainer.critic.model.lora"
ALL_LINEAR = "all-linear"
# Those of PEFT that leave the base weights as they are, with what PEFT calls them.
INIT_METHODS: dict[str, Literal[True, "gaussian", "orthogonal"]] = {
    "kaiming": True,
    "gaussian": "gaussian",
    "orthogonal": "orthogonal",
}


def values(cfg: Any) -> Iterator[str]:
    """Names that exist, and lists that name something."""
    for key, lora in ((L, cfg.trainer.policy.model.lora), (CRITIC, cfg.trainer.critic.model.lora)):
        if not lora.rank:
            continue
        if lora.init_method not in INIT_METHODS:
            yield f"{key}.init_method={lora.init_method}: {listed(lora.init_method, INIT_METHODS)}"
        if lora.init_method == "orthogonal" and lora.rank % 2:
            yield f"{key}.init_method=orthogonal needs an even {key}.rank, not {lora.rank}: take {lora.rank + 1}"
        if not lora.target_modules:
            yield f"{key}.target_modules is empty: expected {ALL_LINEAR}, or a list such as ['q_proj','v_proj']"


def servers(cfg: Any) -> Iterator[str]:
    """Servers that take adapters, by a way that carries them. Those that run already are asked when they are connected
    to."""
    lora, engine = cfg.trainer.policy.model.lora, cfg.generator.inference_engine
    if not lora.rank:
        return
    if engine.weight_sync_backend == "delta":
        yield (
            f"{L}.rank={lora.rank} excludes generator.inference_engine.weight_sync_backend=delta: an adapter is small "
            f"and is sent whole; write weight_sync_backend=auto"
        )
    if engine.external_server_urls or engine.server_command:
        return
    try:
        entry = table.find(engine)
    except ValueError:
        return  # told by the rule on servers
    if entry.lora is None:
        able = ", ".join(table.with_adapters())
        yield (
            f"{L}.rank={lora.rank}: the server kind generator.inference_engine.backend={engine.backend} takes no "
            f"adapters; those that do: {able}. Take one of them, add `lora` to its entry, or set {L}.rank=0"
        )


def reference(cfg: Any) -> Iterator[str]:
    """A reference that stays: it has no adapter that could follow the policy's."""
    rank, trainer = cfg.trainer.policy.model.lora.rank, cfg.trainer
    if rank and trainer.update_ref_every_epoch and trainer.algorithm.needs_reference:
        yield (
            f"trainer.update_ref_every_epoch=true with {L}.rank={rank}: the reference has no adapter and cannot "
            f"follow: leave it out, or train the whole weights with {L}.rank=0"
        )


RULES: tuple[Callable[[Any], Iterator[str]], ...] = (values, servers, reference)

TRAINED = ("alpha", "dropout", "target_modules", "exclude_modules", "init_method")
SERVED = ("max_loras", "max_cpu_loras")
IDLE = (
    Idle(
        tuple(f"{L}.{name}" for name in (*TRAINED, *SERVED)),
        lambda cfg: not cfg.trainer.policy.model.lora.rank,
        f"LoRA is off ({L}.rank=0)",
    ),
    Idle(
        tuple(f"{CRITIC}.{name}" for name in TRAINED),
        lambda cfg: not cfg.trainer.critic.model.lora.rank,
        f"the critic trains all its weights ({CRITIC}.rank=0)",
    ),
    Idle(tuple(f"{CRITIC}.{name}" for name in SERVED), lambda cfg: True, "no server has the critic"),
    Idle(
        (f"{L}.lora_sync_path", f"{CRITIC}.lora_sync_path"),
        lambda cfg: True,
        "adapters travel through the seam: there is no shared folder",
    ),
)
