"""Which of the integration's keys are other names of shared keys, and the configuration with both saying the same.

A key that is set under both names with different values is an error: nothing wins silently.
"""

from __future__ import annotations

from typing import Any

from pydantic import model_validator
from skyrl.train.config import ConfigPart, SkyRLTrainConfig

ENGINE = "generator.inference_engine"

# trainer.arctic_rl.<name> -> the shared key with the same meaning.
SHARED_NAMES: dict[str, str] = {
    "optimizer_betas": "trainer.policy.optimizer_config.adam_betas",
    "lr_scheduler_type": "trainer.policy.optimizer_config.scheduler",
    "enable_gradient_checkpointing": "trainer.gradient_checkpointing",
    "vllm_max_num_seqs": f"{ENGINE}.max_num_seqs",
    "vllm_enforce_eager": f"{ENGINE}.enforce_eager",
    "vllm_enable_prefix_caching": f"{ENGINE}.enable_prefix_caching",
    "vllm_max_num_batched_tokens": f"{ENGINE}.max_num_batched_tokens",
    "startup_timeout": f"{ENGINE}.server_start_timeout_s",
}

# trainer.arctic_rl.<name> -> the argument of the engine that it sets.
ENGINE_ARGUMENTS: dict[str, str] = {
    "vllm_max_model_len": "max_model_len",
    "vllm_enable_chunked_prefill": "enable_chunked_prefill",
}


class ArcticRootConfig(SkyRLTrainConfig):
    """The shared configuration after the integration's other names for its keys were read."""

    @model_validator(mode="after")
    def _read_other_names(self) -> ArcticRootConfig:
        if hasattr(self.trainer, "arctic_rl"):
            for name, part in apply_other_names(self).items():
                object.__setattr__(self, name, part)
        return self


def apply_other_names(cfg: Any) -> dict[str, ConfigPart]:
    """The `trainer` and `generator` sections with every mapped key of `trainer.arctic_rl` written to its shared key.

    ValueError where both names of one key are set to different values.
    """
    arctic, roots = cfg.trainer.arctic_rl, {"trainer": cfg.trainer, "generator": cfg.generator}
    for name, path in SHARED_NAMES.items():
        value = getattr(arctic, name)
        if value is not None:
            root, _, rest = path.partition(".")
            roots[root] = _set(roots[root], rest.split("."), value, f"trainer.arctic_rl.{name}", path)
    arguments = engine_arguments(arctic)
    if arguments:
        engine = roots["generator"].inference_engine
        both = {**engine.engine_init_kwargs}
        for argument, value in arguments.items():
            if both.setdefault(argument, value) != value:
                raise ValueError(
                    f"{ENGINE}.engine_init_kwargs.{argument}={both[argument]!r} and trainer.arctic_rl ask for "
                    f"different values ({value!r}): set one of them"
                )
        roots["generator"] = _with(roots["generator"], inference_engine=_with(engine, engine_init_kwargs=both))
    return roots


def engine_arguments(arctic: Any) -> dict[str, Any]:
    """What `trainer.arctic_rl` passes through to the engine, by the engine's own argument names."""
    out = dict(arctic.vllm_config or {})
    for name, argument in ENGINE_ARGUMENTS.items():
        if getattr(arctic, name) is not None:
            out[argument] = getattr(arctic, name)
    if arctic.speculative_model:
        out["speculative_config"] = {
            "model": arctic.speculative_model,
            "num_speculative_tokens": arctic.num_speculative_tokens,
        }
    return out


def _set(part: Any, names: list[str], value: Any, ours: str, path: str) -> Any:
    """`part` with the key at `names` replaced, unless the user set it to something else."""
    name, rest = names[0], names[1:]
    current = getattr(part, name)
    if rest:
        return _with(part, **{name: _set(current, rest, value, ours, path)})
    if name in part.model_fields_set and current != value:
        raise ValueError(f"{ours}={value} and {path}={current} are two names of one setting: set one of them")
    return _with(part, **{name: value})


def _with(part: Any, **values: Any) -> Any:
    """A copy with mapped values, which do not count as set by the user."""
    copy = part.model_copy(update=values)
    object.__setattr__(copy, "__pydantic_fields_set__", set(part.model_fields_set))
    return copy
