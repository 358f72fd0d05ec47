"""Where a server's command comes from, and how the configuration becomes its flags."""

from __future__ import annotations

from pathlib import Path

import pytest
from skyrl.train.config import InferenceEngineConfig
from skyrl.train.config.policy import LoraConfig
from skyrl.train.launch import command, cores, table

VALUES = {"model": "/m", "listen": "127.0.0.1:1", "dtype": "float32", "seed": "42"}


def engine(**keys: object) -> InferenceEngineConfig:
    return InferenceEngineConfig.model_validate(keys)


def test_the_workspace_names_vllm_transformers_and_the_reference_server() -> None:
    assert table.find(engine()).package == "skyrl-arctic-inference"
    assert table.find(engine(backend="reference")).package is None
    assert table.find(engine(backend="transformers")).package is None


def test_the_transformers_server_needs_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_the_workspace = table.find(engine(backend="transformers"))
    file = tmp_path / "servers.toml"
    file.write_text('[servers.mine]\ncommand = ["serve-it", "{listen}"]\n')
    monkeypatch.setenv(table.FILE_VARIABLE, str(file))
    beside_a_table = table.find(engine(backend="transformers"))
    for field in ("command", "options", "lora"):
        assert getattr(beside_a_table, field) == getattr(by_the_workspace, field)
    monkeypatch.delenv(table.FILE_VARIABLE)
    monkeypatch.setattr(table, "workspace_root", lambda: None)
    alone = table.find(engine(backend="transformers"))
    assert (alone.command, alone.package, alone.root) == (by_the_workspace.command, None, None)
    with pytest.raises(ValueError, match="no servers table here: this package has transformers"):
        table.find(engine())


def test_an_unknown_server_shows_the_known_ones_and_three_ways_to_name_one() -> None:
    with pytest.raises(ValueError, match="no such server") as caught:
        table.find(engine(backend="vlm"))
    text = str(caught.value)
    assert "reference, transformers, vllm" in text
    assert "did you mean vllm?" in text
    for form in ("[tool.skyrl.servers.NAME]", "server_command='", "external_server_urls=['grpc://host:50051']"):
        assert form in text


def test_a_file_of_ones_own_comes_before_the_workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "servers.toml"
    file.write_text('[servers.mine]\ncommand = ["serve-it", "{listen}"]\n')
    monkeypatch.setenv(table.FILE_VARIABLE, str(file))
    assert table.find(engine(backend="mine")).command == ("serve-it", "{listen}")
    with pytest.raises(ValueError, match="mine"):
        table.find(engine(backend="vllm"))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "no such file"),
        ("a = 1", "no [servers.NAME] in it"),
        ("not toml", "cannot be read"),
        ("[servers.mine]\n", "expected a list of texts"),
        ("[servers.mine]\ncomand = []", "unknown key; known:"),
        ("[servers.mine]\ncommand = 'x'", "expected a list of texts"),
    ],
)
def test_a_file_that_names_no_server_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, told: str
) -> None:
    file = tmp_path / "servers.toml"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv(table.FILE_VARIABLE, str(file))
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is what is tested
        table.find(engine(backend="mine"))
    assert told in str(caught.value)


def test_a_command_of_ones_own_needs_no_table() -> None:
    entry = table.find(engine(server_command="run --model {model} --on {listen} 'a b'"))
    built = command.build(entry, engine(), VALUES, device="cpu", binaries=None)
    assert built == ["run", "--model", "/m", "--on", "127.0.0.1:1", "a b"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("run --model {model}", "does not say {listen}"),
        ("run {listen} {port}", "is no placeholder"),
        ("run 'a {listen}", "No closing quotation"),
    ],
)
def test_a_command_that_cannot_be_filled_is_told(text: str, told: str) -> None:
    with pytest.raises(ValueError, match="server_command") as caught:
        command.build(table.find(engine(server_command=text)), engine(), VALUES, device="cpu", binaries=None)
    assert told in str(caught.value)


def test_options_become_flags() -> None:
    options = {
        "max_num_seqs": "--max-num-seqs", "enforce_eager": "--eager", "enable_prefix_caching": "--arg prefix={json}",
        "engine_init_kwargs": "--arg", "gpu_memory_utilization": "--gpu", "external_server_urls": "--never",
    }  # fmt: skip
    entry = table.ServerEntry("x", ("run", "{listen}"), options=options)
    keys = engine(max_num_seqs=8, enforce_eager=True, engine_init_kwargs={"a": 1, "b": {"c": "d"}})
    on_cpu = command.build(entry, keys, VALUES, device="cpu", binaries=None)[2:]
    assert on_cpu == ["--max-num-seqs", "8", "--eager", "--arg", "prefix=true", "--arg", "a=1", "--arg", 'b={"c": "d"}']
    assert "--gpu" in command.build(entry, keys, VALUES, device="cuda", binaries=None)
    assert "--eager" not in command.build(entry, engine(), VALUES, device="cpu", binaries=None)


@pytest.mark.parametrize(
    ("keys", "device", "flags"),
    [
        ({}, "cuda", []),
        ({"weight_sync_backend": "delta"}, "cpu", ["--delta"]),
        ({"weight_sync_backend": "nccl"}, "cpu", []),
        ({"expert_parallel_size": 4}, "cuda", ["--experts"]),
        ({"expert_parallel_size": 4}, "cpu", []),
        ({"language_model_only": True}, "cpu", ["--text", "only"]),
        ({"speculative_config": {"model": "d"}}, "cpu", ["--arg", 'spec={"model": "d"}']),
    ],
)
def test_a_value_may_have_flags_of_its_own(keys: dict[str, object], device: str, flags: list[str]) -> None:
    options = {
        "weight_sync_backend": {"delta": "--delta"}, "expert_parallel_size": {"1": "", "*": "--experts"},
        "language_model_only": {"true": "--text only"}, "speculative_config": "--arg spec={json}",
    }  # fmt: skip
    entry = table.ServerEntry("x", ("run", "{listen}"), options=options)
    assert command.build(entry, engine(**keys), VALUES, device=device, binaries=None)[2:] == flags


def test_each_copy_of_an_engine_is_a_server_and_each_has_its_gpus() -> None:
    assert engine(num_engines=2, data_parallel_size=3).num_servers == 6
    assert engine(tensor_parallel_size=2, pipeline_parallel_size=2).gpus_per_server == 4


def test_a_run_that_trains_an_adapter_starts_its_server_with_room_for_it() -> None:
    vllm = table.find(engine())

    def flags(**lora: object) -> list[str]:
        plain = command.build(vllm, engine(), VALUES, device="cuda", binaries=None)
        more = command.build(vllm, engine(), VALUES, device="cuda", binaries=None, lora=LoraConfig.model_validate(lora))
        assert more[: len(plain)] == plain
        return more[len(plain) :]

    assert flags() == flags(rank=0, max_loras=4) == []
    assert flags(rank=24) == ["--max-loras", "1", "--max-lora-rank", "24"]
    assert flags(rank=8, max_loras=3, max_cpu_loras=5)[-2:] == ["--engine-arg", "max_cpu_loras=5"]
    assert "vllm" in table.with_adapters() and "transformers" in table.with_adapters()
    wrong = table.ServerEntry("x", ("run", "{listen}"), lora={"ranks": "--r"})
    with pytest.raises(ValueError, match=r"servers\.x\.lora\.ranks: trainer\.policy\.model\.lora has no such key"):
        command.build(wrong, engine(), VALUES, device="cpu", binaries=None, lora=LoraConfig(rank=1))


def test_the_commands_own_environment_is_looked_in_first(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    built = command.build(
        table.ServerEntry("x", ("run", "{listen}")), engine(), VALUES, device="cpu", binaries=tmp_path
    )
    assert built[0] == str(tmp_path / "run")


@pytest.mark.parametrize(
    ("num_servers", "num_cores", "trainer", "servers"),
    [
        (1, 2, (0,), ((1,),)),
        (2, 2, (0,), ((1,), (1,))),
        (1, 3, (0, 1), ((2,),)),
        (2, 8, (0, 1, 2, 3), ((4, 5), (6, 7))),
        (3, 8, (0, 1, 2, 3), ((4,), (5,), (6,))),
    ],
)
def test_trainer_and_servers_share_no_core(
    num_servers: int, num_cores: int, trainer: tuple[int, ...], servers: tuple[tuple[int, ...], ...]
) -> None:
    assert cores.plan(num_servers, tuple(range(num_cores))) == cores.CorePlan(trainer, servers)


def test_one_core_is_shared() -> None:
    assert cores.plan(1, (0,)) is None
