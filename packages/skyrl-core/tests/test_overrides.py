"""What a user may write: arguments, files, and what is said to everything else."""

from __future__ import annotations

from pathlib import Path

import pytest
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.config.build import build
from skyrl.train.config.overrides import parse
from skyrl.train.config.problems import ConfigError


def built(*argv: str) -> SkyRLTrainConfig:
    return build(SkyRLTrainConfig, parse(argv)).cfg


def problems(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        built(*argv)
    return str(caught.value)


def test_the_later_of_two_arguments_wins() -> None:
    assert built("trainer.epochs=2", "trainer.epochs=3").trainer.epochs == 3


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("trainer.policy.optimizer_config.lr=1e-6", "trainer.policy.optimizer_config.lr", 1e-6),
        ("trainer.policy.optimizer_config.lr=1", "trainer.policy.optimizer_config.lr", 1.0),
        ("trainer.run_name=123", "trainer.run_name", "123"),
        ("trainer.run_name=1e5", "trainer.run_name", "1e5"),
        ("trainer.run_name='1e5'", "trainer.run_name", "1e5"),
        ("trainer.run_name=a=b", "trainer.run_name", "a=b"),
        ("trainer.run_name=a: b", "trainer.run_name", "a: b"),
        ("trainer.run_name=''", "trainer.run_name", ""),
        ("trainer.project_name=off", "trainer.project_name", "off"),
        ("trainer.max_training_steps=", "trainer.max_training_steps", None),
        ("trainer.max_training_steps=1e3", "trainer.max_training_steps", 1000),
        ("trainer.bf16=True", "trainer.bf16", True),
        ("trainer.logger=console", "trainer.logger", ("console",)),
        ("trainer.logger=['console','jsonl']", "trainer.logger", ("console", "jsonl")),
        ("data.train_data=/a.parquet", "data.train_data", ("/a.parquet",)),
        ("data.train_data=['/a.parquet','/b.json']", "data.train_data", ("/a.parquet", "/b.json")),
        ("trainer.policy.optimizer_config.adam_betas=[0.9,1]", "trainer.policy.optimizer_config.adam_betas", (0.9, 1)),
        ("generator.sampling_params.stop=['</x>']", "generator.sampling_params.stop", ("</x>",)),
        (
            "trainer.policy.fsdp_config.mixed_precision.param_dtype=fp16",
            "trainer.policy.fsdp_config.mixed_precision.param_dtype",
            "fp16",
        ),
        ("trainer.policy.fsdp_config={cpu_offload: true}", "trainer.policy.fsdp_config.cpu_offload", True),
        ("trainer.resume_mode=null", "trainer.resume_mode", "none"),
    ],
)
def test_a_value_is_read_in_the_type_of_its_key(argument: str, key: str, value: object) -> None:
    found: object = built(argument)
    for name in key.split("."):
        found = getattr(found, name)
    assert found == value


def test_free_mappings_take_dotted_and_braced_keys() -> None:
    cfg = built(
        "generator.inference_engine.engine_init_kwargs.max_model_len=4096",
        "generator.inference_engine.engine_init_kwargs={hf_overrides: {a: 1}}",
    )
    assert cfg.generator.inference_engine.engine_init_kwargs == {"max_model_len": 4096, "hf_overrides": {"a": 1}}


def test_a_reference_to_another_key_reads_what_was_set_or_the_default() -> None:
    cfg = built("trainer.project_name=off", "trainer.export_path=/x/${trainer.project_name}/${trainer.seed}")
    assert cfg.trainer.export_path == "/x/off/42"


def test_a_reference_to_nothing_is_a_problem() -> None:
    assert "trainer.export_path=${trainer.nope}" in problems("trainer.export_path=${trainer.nope}")


@pytest.mark.parametrize("text", ["${", "${trainer.seed", "${a:"])
def test_a_reference_that_is_not_closed_is_a_problem(text: str) -> None:
    assert f"trainer.export_path={text}: not a well-formed reference" in problems(f"trainer.export_path={text}")


def test_a_file_that_is_no_yaml_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("trainer:\n  epochs: 3\n  epochs: 4\n")
    assert f"@{file}: not a YAML file: line 3: found duplicate key epochs" in problems(f"@{file}")


def test_a_file_may_be_nested_or_dotted_and_arguments_after_it_win(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "trainer.epochs: 3\ntrainer:\n  seed: 5\n  policy.model.path: /x\ndata: {train_data: ['${here}/t']}\n"
    )
    cfg = built("trainer.seed=4", f"@{file}", "trainer.epochs=7")
    assert (cfg.trainer.epochs, cfg.trainer.seed, cfg.trainer.policy.model.path) == (7, 5, "/x")
    assert cfg.data.train_data == (f"{tmp_path}/t",)


def test_a_written_configuration_is_a_file_that_builds_the_same(tmp_path: Path) -> None:
    cfg = built("trainer.run_name=1e5", "data.val_data=[]", "generator.inference_engine.external_server_urls=unix:/s")
    file = tmp_path / "config.yaml"
    file.write_text(cfg.to_yaml())
    assert built(f"@{file}") == cfg


def test_a_text_with_a_literal_dollar_brace_survives_a_file(tmp_path: Path) -> None:
    cfg = SkyRLTrainConfig.model_validate({"generator": {"sampling_params": {"stop": ["${not.a.reference}"]}}})
    file = tmp_path / "config.yaml"
    file.write_text(cfg.to_yaml())
    assert built(f"@{file}") == cfg


def test_another_name_over_a_written_configuration_gets_its_own_folders(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(built("trainer.run_name=first").to_yaml())
    assert built(f"@{file}", "trainer.run_name=second").trainer.ckpt_path == str(
        Path("runs/skyrl/second/ckpts").absolute()
    )


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("+trainer.x=1", "write trainer.x=1 if the key exists"),
        ("++trainer.x=1", "make_config"),
        ("~trainer.epochs", "write trainer.epochs=null"),
        ("--epochs=3", "write epochs=3"),
        ("--max-steps", "write max_steps=VALUE"),
        ("trainer.epochs", "write trainer.epochs=VALUE"),
        ("a b=1", "is not a key"),
        ("data.train_data=['x", "quote it for the shell"),
        ("@/nope.yaml", "@/nope.yaml: no such file"),
    ],
)
def test_other_forms_are_refused_with_how_to_write_them(argument: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse([argument])
    assert told in str(caught.value)


@pytest.mark.parametrize("content", ["- a\n- b\n", "a: [1\n", "just text"])
def test_a_file_that_is_no_mapping_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        parse([f"@{file}"])


def test_every_problem_is_told_at_once() -> None:
    text = problems("trainer.epoch=3", "trainer.polcy.model.path=x")
    assert "2 problems" in text
    assert "trainer.epoch: unknown key; did you mean trainer.epochs?" in text
    assert "trainer.polcy.model.path: unknown key; did you mean trainer.policy.model.path?" in text


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("trainer.lr", "trainer.policy.optimizer_config.lr"),
        ("generator.inference_engine_expert_parallel_size", "generator.inference_engine.expert_parallel_size"),
        ("lr", "trainer.policy.optimizer_config.lr"),
        ("trainer.optimizer_config.lr", "trainer.policy.optimizer_config.lr"),
    ],
)
def test_a_key_of_another_section_is_found(key: str, meant: str) -> None:
    assert f"did you mean {meant}?" in problems(f"{key}=1")


def test_a_key_that_is_like_none_gets_no_proposal() -> None:
    assert problems("foo=1").endswith("- foo: unknown key")


def test_an_unknown_key_of_a_file_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("generator: {max_turnz: 2}")
    assert f"generator.max_turnz: unknown key (in @{file})" in problems(f"@{file}")


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("trainer.epochs=abc", "a whole number"),
        ("trainer.epochs=true", "a whole number"),
        ("trainer.epochs=1.5", "a whole number"),
        ("trainer.train_batch_size=0", "at least 1"),
        ("trainer.max_training_steps=0", "more than 0"),
        ("trainer.bf16=1", "true or false"),
        ("trainer.policy.optimizer_config.lr=fast", "a number"),
        ("trainer.policy.fsdp_config.reshard_after_forward=hello", "true or false, or a whole number"),
        ("trainer.policy.optimizer_config.adam_betas=[0.9]", "two numbers"),
        ("trainer.resume_mode=lastest", "one of 'none', 'latest', 'from_path'; did you mean latest?"),
        ("generator.sampling_params.top_p=2", "at most 1.0"),
        ("generator.inference_engine.engine_init_kwargs=3", "a mapping"),
        ("data.train_data=[1,2]", "text"),
        ("trainer.policy=null", "a section"),
        ("trainer.policy=3", "a section"),
    ],
)
def test_a_wrong_type_names_key_value_and_what_was_expected(argument: str, expected: str) -> None:
    assert f"{argument}: expected {expected}" in problems(argument)


def test_a_value_is_no_section() -> None:
    assert "trainer.epochs is a value, not a section" in problems("trainer.epochs.x=1")
