"""Public keys that have no place here: listed where they cannot matter, refused where leaving them out would."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import skyrl.train
from skyrl.train.config import SkyRLTrainConfig, schema
from skyrl.train.config.build import Built, build
from skyrl.train.config.inert import ALWAYS, why_inert
from skyrl.train.config.key_report import STARTED_ONLY
from skyrl.train.config.known_keys import NOT_THE_DEFAULT, public_defaults, verdict
from skyrl.train.config.overrides import Overrides, Written, parse
from skyrl.train.config.problems import ConfigError
from skyrl.train.launch import table

DEFAULT = SkyRLTrainConfig().trainer.algorithm.off_policy_correction


def built(*argv: str) -> Built:
    return build(SkyRLTrainConfig, parse(argv))


@pytest.mark.parametrize("key", [key for key, default in public_defaults().items() if default != "<required>"])
def test_every_public_key_is_taken_with_its_public_default(key: str) -> None:
    overrides = Overrides()
    overrides.set(tuple(key.split(".")), Written(public_defaults()[key], None, "a test"))
    result = build(SkyRLTrainConfig, overrides)
    listed = {*result.unused, *result.mapped, *result.user_keys}
    assert any(name == key or key.startswith(name) or name.startswith(key) for name in listed)


@pytest.mark.parametrize(
    "argument",
    [
        "trainer.ref.model.lora.rank=32",
    ],
)
def test_a_setting_of_something_that_is_not_here_is_listed(argument: str) -> None:
    result = built(argument)
    assert argument.partition("=")[0] in result.unused
    assert not result.user_keys


def test_a_public_key_that_has_no_place_here_is_refused_unless_it_has_its_default() -> None:
    path = ("trainer", "log_example_interval")  # every public key has a place or a newer name: asked without those
    assert verdict(path, -1) == ("unused", "it has its public default")
    assert verdict(path, 3) == ("refused", NOT_THE_DEFAULT.format(default=-1))


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("generator.num_inference_engines=2", "write generator.inference_engine.num_engines instead"),
        ("generator.inference_engine.remote_urls=[x]", "external_server_urls"),
        ("generator.inference_engine.enable_http_endpoint=true", "servers speak gRPC"),
        ("generator.inference_engine.async_engine=false", "only true is supported"),
        ("trainer.rope_scaling={type: x}", "hf_overrides.rope_parameters"),
        ("generator.backend=vllm", "generator.backend: write generator.inference_engine.backend instead"),
        (
            "generator.engine_init_kwargs.max_model_len=9",
            "write generator.inference_engine.engine_init_kwargs.max_model_len instead",
        ),
        ("generator.async_engine=true", "generation is asynchronous, always"),
    ],
)
def test_a_key_with_a_successor_says_what_to_write(argument: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        built(argument)
    assert told in str(caught.value)


def test_names_of_earlier_versions_are_renamed() -> None:
    result = built(
        "trainer.use_sample_packing=true",
        "generator.inference_engine.async_engine=true",
        "trainer.log_example_interval=4",
        "trainer.strategy=fsdp2",
    )
    assert (result.cfg.trainer.strategy, result.cfg.trainer.print_example_interval) == ("fsdp", 4)
    assert result.mapped["trainer.use_sample_packing"] == "renamed to trainer.remove_microbatch_padding"
    assert result.mapped["trainer.log_example_interval"] == "renamed to trainer.print_example_interval"
    assert "generator.inference_engine.async_engine" in result.mapped


def test_an_older_interval_that_says_nothing_leaves_the_newer_one_alone() -> None:
    result = built("trainer.log_example_interval=-1", "trainer.print_example_interval=3")
    assert result.cfg.trainer.print_example_interval == 3
    assert result.mapped["trainer.log_example_interval"].startswith("nothing: trainer.print_example_interval")
    with pytest.raises(ConfigError, match=r"trainer\.log_example_interval is the old name of trainer\.print_example"):
        built("trainer.log_example_interval=2", "trainer.print_example_interval=3")


def test_the_older_form_of_a_token_level_ratio_becomes_the_newer_one() -> None:
    result = built("trainer.algorithm.use_tis=true", "trainer.algorithm.tis_imp_ratio_cap=3.5")
    settings = result.cfg.trainer.algorithm.off_policy_correction
    assert (settings.tis_ratio_type, settings.token_tis_ratio_clip_high) == ("token", 3.5)
    assert set(result.mapped) == {"trainer.algorithm.use_tis", "trainer.algorithm.tis_imp_ratio_cap"}
    # public SkyRL would multiply every token by its default cap of -1
    assert built("trainer.algorithm.use_tis=true").cfg.trainer.algorithm.off_policy_correction == (
        DEFAULT.model_copy(update={"tis_ratio_type": "token"})
    )
    off = built("trainer.algorithm.use_tis=false", "trainer.algorithm.tis_imp_ratio_cap=3.5")
    assert off.cfg.trainer.algorithm.off_policy_correction == DEFAULT
    assert "trainer.algorithm.tis_imp_ratio_cap" in off.unused


def test_the_older_and_the_newer_form_of_a_ratio_together_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"use_tis is the old form of trainer\.algorithm\.off_policy_correction"):
        built("trainer.algorithm.use_tis=true", "trainer.algorithm.off_policy_correction.tis_ratio_type=token")


def test_the_old_and_the_new_name_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        built("trainer.use_sample_packing=true", "trainer.remove_microbatch_padding=true")


def test_a_key_of_another_backend_says_which() -> None:
    with pytest.raises(ConfigError, match=r"set trainer\.backend=other_backend too"):
        build(SkyRLTrainConfig, parse(["trainer.other_backend.x=1"]), backends=["other_backend"])


def test_no_key_of_the_configuration_is_dead() -> None:
    """Each leaf is read somewhere outside the configuration, goes to the server by the table, or is reported."""
    package = Path(skyrl.train.__file__).parent
    sources = [path for path in package.rglob("*.py") if package / "config" not in path.parents]
    text = "\n".join(path.read_text() for path in [*sources, package / "config" / "root.py"])
    server = table.find(SkyRLTrainConfig().generator.inference_engine)
    served = {*server.options, *(server.lora or {}), "lora_sync_path"}  # the last one is listed as unused, always
    for name in schema.key_names(SkyRLTrainConfig):
        leaf = name.rsplit(".", 1)[-1]
        role_free = re.sub("^(policy|ref|critic)_", "", leaf)  # policy.roles reads them with the role's name put in
        read = re.search(rf"\.{leaf}\b|[\"']{leaf}[\"']|_{role_free}\b", text)
        by_environment = name.startswith("environment.skyrl_gym.")  # an environment gets its whole section
        told = name in ALWAYS or leaf in STARTED_ONLY or why_inert(name) is not None
        assert told or read or by_environment or leaf in served, f"{name} is read nowhere"
