"""What becomes of the keys of LoRA: which are listed as unused and when, and which kind of server is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from skyrl.train.backends import KeyReport
from skyrl.train.config import SkyRLTrainConfig, key_report
from skyrl.train.config.build import build
from skyrl.train.config.overrides import parse
from skyrl.train.config.problems import ConfigError
from skyrl.train.config.validation import validate
from skyrl.train.launch import table

L = "trainer.policy.model.lora"
KEYS = (
    "alpha=32", "dropout=0.1", "target_modules=[q_proj]", "exclude_modules=[k_proj]", "init_method=gaussian",
    "max_loras=2", "max_cpu_loras=4", "lora_sync_path=/x",
)  # fmt: skip


def report(*argv: str) -> KeyReport:
    built = build(SkyRLTrainConfig, parse(argv))
    engine = built.cfg.generator.inference_engine
    server = None if engine.external_server_urls else table.find(engine)
    return key_report.report(built, "cpu", server)


def test_without_a_rank_every_other_key_of_lora_is_listed_as_unused() -> None:
    found = report(*(f"{L}.{argument}" for argument in KEYS))
    assert not found.honoured and len(found.unused) == len(KEYS)
    assert found.unused[f"{L}.alpha"] == "LoRA is off (trainer.policy.model.lora.rank=0)"


def test_with_one_they_are_honoured_but_for_the_shared_folder() -> None:
    found = report(f"{L}.rank=8", *(f"{L}.{argument}" for argument in KEYS))
    assert list(found.unused) == [f"{L}.lora_sync_path"]
    assert "travel through the seam" in found.unused[f"{L}.lora_sync_path"]


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("generator.inference_engine.external_server_urls=[grpc://h:1]", "the servers run already"),
        ("generator.inference_engine.backend=transformers", "the server 'transformers' takes no such option"),
    ],
)
def test_room_for_adapters_is_asked_of_servers_that_are_started_and_take_the_flag(where: str, why: str) -> None:
    found = report(f"{L}.rank=8", f"{L}.max_loras=2", where)
    assert why in found.unused[f"{L}.max_loras"]


def test_enforce_eager_stays_as_it_was_set() -> None:
    built = build(SkyRLTrainConfig, parse([f"{L}.rank=8", "generator.inference_engine.enforce_eager=true"]))
    assert built.cfg.generator.inference_engine.enforce_eager is True


def test_a_server_kind_without_adapters_is_refused_and_those_with_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "servers.toml"
    plain = '[servers.{}]\ncommand = ["serve-it", "{{listen}}"]\n'
    file.write_text(plain.format("mine") + plain.format("able") + "[servers.able.lora]\n")
    monkeypatch.setenv(table.FILE_VARIABLE, str(file))
    model = f"trainer.policy.model.path={tmp_path}"
    (tmp_path / "config.json").write_text("{}")

    def check(backend: str, *more: str) -> None:
        validate(build(SkyRLTrainConfig, parse([f"generator.inference_engine.backend={backend}", model, *more])).cfg)

    check("mine")
    check("able", f"{L}.rank=8")
    with pytest.raises(ConfigError, match=r"backend=mine takes no adapters; those that do: able, transformers\."):
        check("mine", f"{L}.rank=8")


@pytest.mark.parametrize("modules", ["all-linear", ".*q_proj", "[q_proj,v_proj]"])
def test_target_modules_are_the_same_after_a_file(modules: str, tmp_path: Path) -> None:
    cfg = build(SkyRLTrainConfig, parse([f"{L}.rank=8", f"{L}.target_modules={modules}"])).cfg
    file = tmp_path / "config.yaml"
    file.write_text(cfg.to_yaml())
    assert build(SkyRLTrainConfig, parse([f"@{file}"])).cfg == cfg
    assert isinstance(cfg.trainer.policy.model.lora.target_modules, tuple) == modules.startswith("[")
