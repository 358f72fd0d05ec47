"""Whether a model can be cut as `fsdp_config` says, and is the model that the servers have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from skyrl.train.config.absent import shown
from skyrl.train.policy.roles import num_workers, roles_of

ROPE = "rope_parameters"
OURS = f"trainer.policy.model_config_kwargs.{ROPE}"
THEIRS = f"generator.inference_engine.engine_init_kwargs.hf_overrides.{ROPE}"


def shards(cfg: Any) -> Iterator[str]:
    """Sizes that divide the workers, on the backend that reads them."""
    trainer = cfg.trainer
    if trainer.backend != "fsdp" or trainer.mode == "generate":
        return
    for role in roles_of(cfg):
        workers = num_workers(cfg, role)
        fsdp, key = getattr(trainer, role).fsdp_config, f"trainer.{role}.fsdp_config"
        size, group = fsdp.fsdp_size, fsdp.reshard_after_forward
        if size != -1 and (size < 1 or workers % size):
            yield f"{key}.fsdp_size={size}: expected -1, or a divisor of the {workers} {role} workers"
            continue
        ranks = workers if size == -1 else size
        if not isinstance(group, bool) and (group < 1 or ranks % group):
            yield (
                f"{key}.reshard_after_forward={group}: expected true, false, or a divisor of the {ranks} workers that "
                f"share one copy"
            )


def positions(cfg: Any) -> Iterator[str]:
    """One position embedding on both sides. Servers that run already are started by their owner."""
    engine = cfg.generator.inference_engine
    overrides = engine.engine_init_kwargs.get("hf_overrides")
    if engine.external_server_urls or not isinstance(overrides, dict | None):
        return
    ours, theirs = cfg.trainer.policy.model_config_kwargs.get(ROPE), (overrides or {}).get(ROPE)
    if ours != theirs:
        yield (
            f"{OURS}={shown(ours)} and {THEIRS}={shown(theirs)}: trainer and servers must compute the same model: give "
            f"both the same"
        )


RULES: tuple[Callable[[Any], Iterator[str]], ...] = (shards, positions)
