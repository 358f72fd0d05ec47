"""The configuration of a run: typed, frozen, and strict about keys."""

from skyrl.train.config.algorithm import AlgorithmConfig
from skyrl.train.config.data import DataConfig, DataLoaderConfig
from skyrl.train.config.environment import EnvironmentConfig, SkyRLGymConfig
from skyrl.train.config.fully_async import FullyAsyncConfig
from skyrl.train.config.generator import (
    ChatTemplateConfig,
    EvalSamplingParams,
    GeneratorConfig,
    SamplingParams,
)
from skyrl.train.config.inference_engine import InferenceEngineConfig
from skyrl.train.config.make_config import combine_parts, make_config
from skyrl.train.config.part import ConfigPart, key, section
from skyrl.train.config.policy import (
    CriticConfig,
    CriticModelConfig,
    CriticOptimizerConfig,
    FSDPConfig,
    MixedPrecisionConfig,
    ModelConfig,
    OptimizerConfig,
    PolicyConfig,
    RefConfig,
    RefModelConfig,
)
from skyrl.train.config.root import SkyRLTrainConfig
from skyrl.train.config.trainer import PlacementConfig, TrainerConfig

__all__ = [
    "AlgorithmConfig",
    "ChatTemplateConfig",
    "ConfigPart",
    "CriticConfig",
    "CriticModelConfig",
    "CriticOptimizerConfig",
    "DataConfig",
    "DataLoaderConfig",
    "EnvironmentConfig",
    "EvalSamplingParams",
    "FSDPConfig",
    "FullyAsyncConfig",
    "GeneratorConfig",
    "InferenceEngineConfig",
    "MixedPrecisionConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PlacementConfig",
    "PolicyConfig",
    "RefConfig",
    "RefModelConfig",
    "SamplingParams",
    "SkyRLGymConfig",
    "SkyRLTrainConfig",
    "TrainerConfig",
    "combine_parts",
    "key",
    "make_config",
    "section",
]
