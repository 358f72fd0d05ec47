"""What a public entrypoint module's name selects here: overrides that lie under the user's own.

Public recipes start one script per way of training. Here one entrypoint reads the same choice from the configuration:
a name stands for keys, and `trainer.override_entrypoint=NAME` accepts it. Nothing is imported by such a name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from skyrl.train.config.overrides import parse
from skyrl.train.config.problems import listed

KEY = "trainer.override_entrypoint"


@dataclass(frozen=True)
class Selection:
    """`overrides`: arguments that the name stands for; the user's own come after them. `brings`: what the public module
    adds in code of its own, which no key can select: the user registers it, by `environment.plugins` or in a script."""

    overrides: tuple[str, ...] = ()
    brings: str = ""


DAPO = ("trainer.algorithm.overlong_buffer_len=512", "trainer.algorithm.overlong_buffer_penalty_factor=1.0")
FULLY_ASYNC = ("trainer.fully_async.enabled=true",)

PUBLIC_ENTRYPOINTS: dict[str, Selection] = {
    "skyrl.train.entrypoints.main_base": Selection(),
    "skyrl.train.entrypoints.main_generate": Selection(("trainer.mode=generate",)),
    "examples.train.algorithms.dapo.main_dapo": Selection(DAPO),
    "examples.train.tis_correction.main_tis_dapo": Selection(DAPO),
    "examples.train.async.main_async": Selection(("trainer.mode=one_step_off",)),
    "examples.train.fully_async.main_fully_async": Selection(FULLY_ASYNC),
    "examples.train.fully_async.main_fully_async_sim": Selection(
        (*FULLY_ASYNC, "trainer.fully_async.simulate_training=true")
    ),
    "examples.train.algorithms.custom_policy_loss.main_custom_policy_loss": Selection(
        brings="the policy loss 'reinforce'"
    ),
    "examples.train.multiply.main_multiply": Selection(brings="the environment 'multiply'"),
    "examples.train.llm_as_a_judge.main_llm_judge": Selection(brings="the environment 'llm_as_a_judge'"),
    "examples.train.on_policy_distillation.main_on_policy_distill": Selection(
        brings="the advantage estimator 'no_op' and a trainer whose rewards come from a teacher"
    ),
    "examples.train.rlm.main_rlm": Selection(brings="the environments and the generator of recursive agents"),
    "examples.train.geometry3k.geometry3k_entrypoint": Selection(brings="the environment 'geometry3k', with images"),
    "examples.train.visgym.entrypoint": Selection(brings="the environments of VisGym, with images"),
    "examples.train_integrations.harbor.entrypoints.main_harbor": Selection(brings="Harbor's generator and data"),
    "examples.train_integrations.harbor.entrypoints.main_harbor_fully_async": Selection(
        FULLY_ASYNC, brings="Harbor's generator and data"
    ),
    "examples.train_integrations.openenv.entrypoints.main_openenv": Selection(brings="the environment 'openenv'"),
    "examples.train_integrations.openreward.entrypoints.main_openreward": Selection(
        brings="the environment 'openreward'"
    ),
    "examples.train_scripts.full_context.main_full_ctx": Selection(
        brings="a trainer on made-up batches of full length, and the key trainer.num_dummy_steps"
    ),
}  # fmt: skip


def selected_by(entrypoint: str) -> tuple[str, ...]:
    """The overrides that a public entrypoint stands for, to be laid under the user's own.

    `entrypoint` is a module's name, or the path of its file in a checkout (anything in front of `examples/`, `skyrl/`
    or `integrations/` is left out). ValueError lists the known names for any other.
    """
    return selection(entrypoint).overrides


def with_selected(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """(the arguments with what `trainer.override_entrypoint` selects under them, what became of that key). Unchanged
    where it is not set or names no public entrypoint: then it is the older spelling of a backend."""
    named = parse(argv).get(KEY)
    if named is None or module_name(str(named)) not in PUBLIC_ENTRYPOINTS:
        return list(argv), {}
    chosen = selection(str(named))
    parts = [f"selects {' '.join(chosen.overrides)}" if chosen.overrides else "selects nothing: it is this entrypoint"]
    if chosen.brings:
        parts.append(f"{chosen.brings} of that module: register yours, in a script or by environment.plugins")
    return [*chosen.overrides, *argv, f"{KEY}=null"], {KEY: "; ".join(parts)}


def selection(entrypoint: str) -> Selection:
    """The row of the table; ValueError lists the known names."""
    name = module_name(entrypoint)
    if name not in PUBLIC_ENTRYPOINTS:
        raise ValueError(f"{entrypoint}: no public entrypoint of that name; {listed(name, PUBLIC_ENTRYPOINTS)}")
    return PUBLIC_ENTRYPOINTS[name]


def module_name(entrypoint: str) -> str:
    """`$(pwd)/examples/train/visgym/entrypoint.py` is `examples.train.visgym.entrypoint`."""
    dotted = entrypoint.strip().removesuffix(".py").replace("/", ".")
    found = re.search(r"(?:^|[. ])((?:examples|integrations|skyrl)\..*)$", dotted)
    return found.group(1) if found else dotted
