"""The whole configuration, and what is derived in it from other keys."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from functools import reduce
from typing import Any, Self, cast

from omegaconf import OmegaConf
from pydantic import model_validator

from skyrl.train.config.data import DataConfig
from skyrl.train.config.environment import EnvironmentConfig
from skyrl.train.config.generator import GeneratorConfig
from skyrl.train.config.part import ConfigPart, section
from skyrl.train.config.trainer import TrainerConfig

DERIVED = (
    "trainer.mode",
    "trainer.ckpt_path",
    "trainer.export_path",
    "trainer.log_path",
    "trainer.ref.model.path",
    "trainer.algorithm.temperature",
    "generator.max_input_length",
    "generator.eval_sampling_params.max_generate_length",
)

# Keys that decide by being set: unset, each follows the mode, the servers or the policy's workers.
SET_OR_NOT = (
    "trainer.placement.colocate_all",
    "trainer.placement.critic_num_nodes",
    "trainer.placement.critic_num_gpus_per_node",
    "trainer.placement.ref_num_nodes",
    "trainer.placement.ref_num_gpus_per_node",
    "generator.inference_engine.run_engines_locally",
)


class SkyRLTrainConfig(ConfigPart):
    """The root. Attribute paths are the public keys: `cfg.trainer.policy.optimizer_config.lr`."""

    data: DataConfig = section(DataConfig)
    environment: EnvironmentConfig = section(EnvironmentConfig)
    trainer: TrainerConfig = section(TrainerConfig)
    generator: GeneratorConfig = section(GeneratorConfig)

    @model_validator(mode="after")
    def _derive(self) -> SkyRLTrainConfig:
        """Fills what was left unset from the keys that it follows."""
        object.__setattr__(self, "trainer", _derived_trainer(self.trainer, self.generator))
        object.__setattr__(self, "generator", _derived_generator(self.generator, self.trainer))
        return self

    @classmethod
    def from_cli_overrides(cls, argv: Sequence[str]) -> Self:
        """The configuration of a script of one's own, which hands it to `BasePPOExp(cfg).run()`: what the arguments say
        over this class's defaults, checked, with the keys of the backend that they choose. ConfigError lists everything
        that is wrong."""
        from skyrl.train import backends  # both build configurations, and so know this module
        from skyrl.train.config.make_config import parts_of

        return cast(Self, backends.resolve(argv, parts_of(cls))[0])

    def with_backend(self, name: str) -> SkyRLTrainConfig:
        """This configuration with `trainer.backend=name`."""
        return _with(self, trainer=_with(self.trainer, backend=name))

    def to_yaml(self) -> str:
        """The configuration as YAML: itself a valid `@file` that builds this configuration again.

        A key that follows others (`DERIVED`) stays unset in it, so that `@config.yaml trainer.run_name=other` does not
        write into the first run's folders; one of `SET_OR_NOT` that the user left out is left out of it.
        """
        values = self.model_dump(mode="json")
        for path in SET_OR_NOT:
            *sections, name = path.split(".")
            without = copy.deepcopy(values)
            del _below(without, sections)[name]
            was_set = name in reduce(getattr, sections, self).model_fields_set
            values = without if not was_set and self._is_built_by(without) else values
        for path in DERIVED:
            *sections, name = path.split(".")
            part: Any = type(self)
            for section_name in sections:
                part = part.model_fields[section_name].annotation
            without = copy.deepcopy(values)
            _below(without, sections)[name] = part.model_fields[name].get_default()
            values = without if self._is_built_by(without) else values
        return OmegaConf.to_yaml(OmegaConf.create(_escaped(values)))

    def _is_built_by(self, values: dict[str, Any]) -> bool:
        return bool(type(self).model_validate_json(json.dumps(values)) == self)


def _below(tree: dict[str, Any], sections: list[str]) -> dict[str, Any]:
    for name in sections:
        tree = tree[name]
    return tree


def _derived_trainer(trainer: TrainerConfig, generator: GeneratorConfig) -> TrainerConfig:
    """Mode, reference model, temperature and folders; servers that run elsewhere or all the time share no device with
    the trainer."""
    values: dict[str, Any] = {"resume_mode": trainer.resume_mode or "none"}
    mode = values["mode"] = trainer.mode or ("fully_async" if trainer.fully_async.enabled else "plain")
    if trainer.strategy == "fsdp2":
        values["strategy"] = "fsdp"
    for name, folder in (("ckpt_path", "ckpts"), ("export_path", "exports"), ("log_path", "logs")):
        path = getattr(trainer, name) or str(trainer.run_folder / folder)
        values[name] = path if "://" in path else os.path.abspath(os.path.expanduser(path))
    ref = trainer.ref
    if ref.model.path is None:
        values["ref"] = _with(ref, model=_with(ref.model, path=trainer.policy.model.path))
    if trainer.algorithm.temperature is None:
        values["algorithm"] = _with(trainer.algorithm, temperature=generator.sampling_params.temperature)
    placement = trainer.placement
    apart = generator.inference_engine.external_server_urls or mode in ("one_step_off", "fully_async")
    if apart and "colocate_all" not in placement.model_fields_set:
        values["placement"] = _with(placement, colocate_all=False)
    return _with(trainer, **values)


def _derived_generator(generator: GeneratorConfig, trainer: TrainerConfig) -> GeneratorConfig:
    """Context length, evaluation length; external servers are not started."""
    values: dict[str, Any] = {}
    if generator.max_input_length is None:
        values["max_input_length"] = trainer.max_prompt_length
    evaluation = generator.eval_sampling_params
    if not evaluation.max_generate_length:
        length = generator.sampling_params.max_generate_length
        values["eval_sampling_params"] = _with(evaluation, max_generate_length=length)
    engine = generator.inference_engine
    if engine.external_server_urls and "run_engines_locally" not in engine.model_fields_set:
        values["inference_engine"] = _with(engine, run_engines_locally=False)
    return _with(generator, **values)


def _escaped(value: Any) -> Any:
    """Texts with a literal `${` keep it when the file is read again."""
    if isinstance(value, dict):
        return {name: _escaped(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def _with(part: Any, **values: Any) -> Any:
    """A copy with derived values, which do not count as set by the user."""
    copy = part.model_copy(update=values)
    object.__setattr__(copy, "__pydantic_fields_set__", set(part.model_fields_set))
    return copy
