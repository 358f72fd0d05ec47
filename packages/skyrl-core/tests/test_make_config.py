"""Extensions replace sections of the configuration, and compose."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from skyrl.train.config import (
    AlgorithmConfig,
    GeneratorConfig,
    SkyRLTrainConfig,
    TrainerConfig,
    combine_parts,
    key,
    make_config,
)
from skyrl.train.config.differences import as_markdown, differences
from skyrl.train.config.known_keys import public_defaults


class OverlongAlgorithm(AlgorithmConfig):
    """An algorithm with a key of its own."""

    overlong_buffer_len: int = key(7, "A key of an extension.")


class FirstTrainer(TrainerConfig):
    """A trainer with a key of its own and another default."""

    first: int = key(1, "A key of an extension.")
    epochs: int = key(5, "Another default.")


class SecondTrainer(TrainerConfig):
    """Another one."""

    second: int = key(2, "A key of an extension.")
    seed: int = key(9, "Another default.")


class ThirdTrainer(TrainerConfig):
    """One that disagrees with the first."""

    epochs: int = key(6, "Another default.")


def test_a_section_is_replaced() -> None:
    cfg = make_config(trainer_cls=FirstTrainer).model_validate({"trainer": {"first": 3}})
    assert (cfg.trainer.first, cfg.trainer.epochs, cfg.generator) == (3, 5, GeneratorConfig(max_input_length=512,
        eval_sampling_params=cfg.generator.eval_sampling_params))  # fmt: skip


def test_an_algorithm_goes_into_the_trainer_that_is_given() -> None:
    cfg = make_config(trainer_cls=FirstTrainer, algorithm_cls=OverlongAlgorithm)()
    assert (cfg.trainer.first, cfg.trainer.algorithm.overlong_buffer_len) == (1, 7)


def test_two_extensions_of_one_section_compose() -> None:
    parts = combine_parts(
        {"algorithm_cls": OverlongAlgorithm, "trainer_cls": FirstTrainer}, {"trainer_cls": SecondTrainer}
    )
    cfg = make_config(**parts)()
    assert (cfg.trainer.first, cfg.trainer.second, cfg.trainer.epochs, cfg.trainer.seed) == (1, 2, 5, 9)
    assert cfg.trainer.algorithm.overlong_buffer_len == 7
    assert isinstance(cfg.trainer, FirstTrainer)
    assert isinstance(cfg.trainer, SecondTrainer)


def test_two_extensions_that_disagree_on_a_key_are_refused() -> None:
    with pytest.raises(ValueError, match="both change the key 'epochs'"):
        combine_parts({"trainer_cls": FirstTrainer}, {"trainer_cls": ThirdTrainer})


def test_a_class_of_another_section_is_refused() -> None:
    with pytest.raises(ValueError, match="trainer_cls must be a subclass of TrainerConfig"):
        make_config(trainer_cls=GeneratorConfig)


def test_a_composed_configuration_reaches_other_processes() -> None:
    parts = combine_parts({"trainer_cls": FirstTrainer}, {"trainer_cls": SecondTrainer})
    cfg = make_config(**parts).model_validate({"trainer": {"seed": 3}})
    again = pickle.loads(pickle.dumps(cfg))
    assert again == cfg
    assert type(again) is type(cfg)


def test_nothing_can_be_changed_afterwards() -> None:
    with pytest.raises(ValueError, match="frozen"):
        SkyRLTrainConfig().trainer.seed = 3  # type: ignore[misc]


def test_each_default_that_differs_from_the_public_one_stands_in_the_table() -> None:
    """Both ways: what differs is declared, and what is declared differs."""
    declared = {d.key for d in differences()}
    ours = SkyRLTrainConfig()
    differing = set()
    for name, theirs in public_defaults().items():
        part: object = ours
        for word in name.split("."):
            if not hasattr(part, word):
                break
            part = getattr(part, word)
        else:
            value = list(part) if isinstance(part, tuple) else part
            if value != theirs and theirs != "<required>":
                differing.add(name)
    dependent = {"generator.eval_sampling_params.temperature", "generator.eval_sampling_params.max_generate_length"}
    assert differing == declared - dependent
    assert all(d.reason for d in differences())
    assert as_markdown().count("\n") == len(declared) + 1


def test_the_readme_carries_the_table_of_differing_defaults() -> None:
    readme = Path(__file__).parents[1] / "README.md"
    assert as_markdown() in readme.read_text()
