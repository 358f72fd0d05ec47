"""Which roles a run has, how many workers each, and which share devices: what is known before any worker starts."""

from __future__ import annotations

from typing import Any

from skyrl.train.algorithms.critic import uses_critic
from skyrl.train.policy.contract import Role


def roles_of(cfg: Any) -> tuple[Role, ...]:
    """Which workers the run has."""
    critic: tuple[Role, ...] = ("critic",) if uses_critic(cfg.trainer) else ()
    reference: tuple[Role, ...] = ("ref",) if cfg.trainer.algorithm.needs_reference else ()
    return ("policy", *critic, *reference)


def shape_of(cfg: Any, role: str) -> tuple[int, int]:
    """(machines, workers on each). The reference's are the policy's where the two share devices."""
    place = cfg.trainer.placement
    beside_policy = role == "ref" and (place.colocate_all or place.colocate_policy_ref)
    name = "policy" if beside_policy else role
    return getattr(place, f"{name}_num_nodes"), getattr(place, f"{name}_num_gpus_per_node")


def num_workers(cfg: Any, role: str) -> int:
    """On all machines."""
    nodes, per_node = shape_of(cfg, role)
    return nodes * per_node


def roles_that_share(cfg: Any) -> tuple[Role, ...]:
    """The roles whose ranks lie on the policy's devices, the policy among them; none where it is alone there."""
    place, shape = cfg.trainer.placement, shape_of(cfg, "policy")
    beside = {"ref": place.colocate_policy_ref or place.colocate_all, "critic": place.colocate_all}
    together = tuple(r for r in roles_of(cfg) if r == "policy" or beside[r] and shape_of(cfg, r) == shape)
    return together if len(together) > 1 else ()


def any_in_process(cfg: Any) -> bool:
    """Whether a role computes in the trainer's own process, as each with one worker does; more workers have a process
    each."""
    return any(num_workers(cfg, role) == 1 for role in roles_of(cfg))
