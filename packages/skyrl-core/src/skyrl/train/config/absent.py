"""Which values ask for an engine that is not here: refused at the start, each engine with one sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from skyrl.train import backends
from skyrl.train.config.overrides import Path_

ENGINE = "generator.inference_engine"


@dataclass(frozen=True)
class Absent:
    """A key, the values of it that cannot be honoured, and what is missing. `*` stands for each section of a name."""

    key: str
    asks: Callable[[Any], bool]
    missing: str


def more_than_one(value: int) -> bool:
    """Whether a size asks for more than one of something."""
    return value > 1


# What would change the run if it were left out without a word.
ABSENT = (
    Absent(
        "trainer.*.model.fake_int4_qat.enabled",
        bool,
        "no training on weights rounded to int4 here: leave the section out, and weights keep their precision",
    ),
    Absent(
        "trainer.mtp.enabled",
        bool,
        "no multi-token-prediction head is trained here: leave the section out; a draft model that is trained already "
        f"goes into {ENGINE}.speculative_config",
    ),
    Absent(
        "trainer.policy.torch_profiler_config.enable",
        bool,
        "no profile is taken here: leave it out, and attach a profiler to the worker's process",
    ),
    Absent(
        "trainer.policy.inference_only_init",
        bool,
        "a policy without an optimizer is not built here: leave it out",
    ),
    Absent(
        "generator.vision_language_generator",
        bool,
        "no vision-language model is trained here: only prompts of text",
    ),
    Absent(
        f"{ENGINE}.enable_pd",
        bool,
        "no servers that only prefill or only decode here: leave it out, with num_prefill and kv_transfer_config, and "
        "every server does both",
    ),
    Absent(
        f"{ENGINE}.enable_return_routed_experts",
        bool,
        "the experts that a server took are not replayed in training here: leave it out",
    ),
    Absent(
        f"{ENGINE}.pipeline_parallel_size",
        more_than_one,
        f"no servers of several stages here: leave it out and raise {ENGINE}.tensor_parallel_size",
    ),
)  # fmt: skip

# Keys of entrypoints that public SkyRL ships as examples, by how they begin, and what runs them there.
EXAMPLES = {
    "harbor_trial_config": "Harbor, which runs these trials, is not part of this project",
    "generator.rate_limit": "Harbor, which runs these trials, is not part of this project",
    "generator.miniswe_": "mini-SWE-agent, which runs these trajectories, is not part of this project",
    "generator.inference_engine.thunder_agent_": "ThunderAgent, which schedules these programs, is not part of this "
    "project",
    "generator.enable_child_agents": "the generator of recursive agents is not part of this project",
    "generator.train_child_trajectories": "the generator of recursive agents is not part of this project",
    "trainer.num_dummy_steps": "a key of the full-context example: an entrypoint of one's own declares it "
    "(skyrl.train.config.make_config)",
}


def rules(cfg: Any) -> Iterator[str]:
    """One sentence for each engine that the configuration asks for and that is not here."""
    megatron = cfg.trainer.strategy == "megatron" and cfg.trainer.backend == "fsdp"
    if megatron:
        others = ", ".join(name for name in backends.installed() if name != cfg.trainer.backend)
        yield (
            f"trainer.strategy=megatron: no Megatron engine here: choose a backend that needs none by trainer.backend "
            f"(installed: {others or 'none'}), or write trainer.strategy=fsdp"
        )
    for absent in ABSENT:
        of_megatron = absent.key.startswith(("trainer.mtp", "trainer.*.model.fake_int4_qat"))
        if megatron and of_megatron:  # they go with the engine that was named already
            continue
        for dotted, value in values_at(cfg, absent.key):
            if absent.asks(value):
                yield f"{dotted}={shown(value)}: {absent.missing}"


def example_key(path: Path_) -> str | None:
    """What runs a key of a public example; None for any other key."""
    dotted = ".".join(path)
    return next((missing for start, missing in EXAMPLES.items() if dotted.startswith(start)), None)


def values_at(part: Any, key: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(key, value) at a dotted key of a configuration; `*` is every section at that place that has the rest."""
    name, _, rest = key.partition(".")
    names = type(part).model_fields if name == "*" else [name] if name in type(part).model_fields else []
    for each in names:
        value = getattr(part, each)
        if not rest:
            yield f"{prefix}{each}", value
        elif hasattr(type(value), "model_fields"):
            yield from values_at(value, rest, f"{prefix}{each}.")


def shown(value: Any) -> str:
    """A value as users write it."""
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
