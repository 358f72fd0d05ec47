"""The configuration of an Arctic run: the shared one with `trainer.arctic_rl`, and what is derived from it."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field
from skyrl.train.config import TrainerConfig, make_config

from arctic_rl.client_config import ArcticRLClientConfig, build_rl_config
from arctic_rl.keys import ArcticRLTrainerConfig
from arctic_rl.mapping import ArcticRootConfig


class ArcticTrainerConfig(TrainerConfig):
    """`trainer.*` with `trainer.arctic_rl.*`; `trainer.arctic_rl={}` and `=null` mean its defaults."""

    arctic_rl: Annotated[ArcticRLTrainerConfig, BeforeValidator(lambda value: {} if value is None else value)] = Field(
        default_factory=ArcticRLTrainerConfig, description="Keys of the Arctic trainer."
    )


# What an entrypoint composes with its own parts.
CONFIG_PARTS: dict[str, type] = {"trainer_cls": ArcticTrainerConfig, "root_cls": ArcticRootConfig}

ArcticSkyRLConfig = make_config(trainer_cls=ArcticTrainerConfig, root_cls=ArcticRootConfig)

__all__ = [
    "CONFIG_PARTS",
    "ArcticRLClientConfig",
    "ArcticRLTrainerConfig",
    "ArcticSkyRLConfig",
    "ArcticTrainerConfig",
    "build_rl_config",
]
