"""Which backend a run gets, and what it is told about the keys that the user set."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from skyrl.train import backends
from skyrl.train.backends import BackendPlugin, KeyReport, backend_name_from_argv, load_plugin, resolve
from skyrl.train.config import AlgorithmConfig, SkyRLTrainConfig, key, key_report
from skyrl.train.config.inert import NO_MEGATRON
from skyrl.train.config.problems import ConfigError

PLUGIN_MODULE = """
from skyrl.train.backends import BackendPlugin
from skyrl.train.config import TrainerConfig, key

class OwnTrainer(TrainerConfig):
    own_knob: int = key(1, "A key of this backend.")

PLUGIN = BackendPlugin(name="{name}", policy_factory="x:y", config_parts={{"trainer_cls": OwnTrainer}})
"""


@pytest.fixture
def module_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes `<name>/entrypoint.py` where Python finds it."""

    def write(name: str, source: str) -> None:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "__init__.py").touch()
        (folder / "entrypoint.py").write_text(source)

    monkeypatch.syspath_prepend(tmp_path)
    yield write
    for module in [m for m in sys.modules if m.startswith("backend_of_a_test")]:
        del sys.modules[module]


def test_the_default_backend_is_fsdp() -> None:
    assert backend_name_from_argv([]) == "fsdp"
    assert load_plugin("fsdp").name == "fsdp"


def test_unset_and_fsdp_are_the_same_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert resolve(["trainer.seed=1"])[0] == resolve(["trainer.seed=1", "trainer.backend=fsdp"])[0]


@pytest.mark.parametrize(
    "argument",
    ["trainer.backend=some_name", "trainer.override_entrypoint=integrations.some_name.entrypoint",
     "trainer.override_entrypoint=some_name"],
)  # fmt: skip
def test_the_older_spelling_names_the_same_backend(argument: str) -> None:
    assert backend_name_from_argv(["trainer.epochs=3", argument]) == "some_name"


def test_a_file_may_name_the_backend(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("trainer: {backend: some_name}")
    assert backend_name_from_argv([f"@{tmp_path / 'run.yaml'}"]) == "some_name"


def test_two_names_for_the_backend_are_refused() -> None:
    with pytest.raises(ConfigError, match="name two backends"):
        backend_name_from_argv(["trainer.backend=a", "trainer.override_entrypoint=b"])


@pytest.mark.parametrize("name", ["fsdpp", "os.path", "not/a name"])
def test_an_unknown_backend_lists_the_installed_ones(name: str) -> None:
    with pytest.raises(ValueError, match=r"no such backend is installed; known: .*fsdp"):
        load_plugin(name)


def test_a_module_with_a_plugin_is_a_backend_with_keys_of_its_own(module_backend) -> None:
    module_backend("backend_of_a_test_a", PLUGIN_MODULE.format(name="backend_of_a_test_a"))

    class OwnAlgorithm(AlgorithmConfig):
        own_buffer: int = key(0, "A key of the entrypoint.")

    argv = ["trainer.backend=backend_of_a_test_a", "trainer.own_knob=3", "trainer.algorithm.own_buffer=4"]
    cfg, plugin = resolve(argv, {"algorithm_cls": OwnAlgorithm}, announce=lambda line: None)
    assert (cfg.trainer.own_knob, cfg.trainer.algorithm.own_buffer, plugin.name) == (3, 4, "backend_of_a_test_a")


def test_a_module_with_only_main_is_handed_control(module_backend, capsys: pytest.CaptureFixture[str]) -> None:
    module_backend("backend_of_a_test_b", "def main():\n    print('in control')\n    return 7\n")
    with pytest.raises(SystemExit) as leaving:
        resolve(["trainer.backend=backend_of_a_test_b", "a.key.of.its.own=1"])
    assert leaving.value.code == 7
    assert "in control" in capsys.readouterr().out


def test_a_module_with_neither_is_refused(module_backend) -> None:
    module_backend("backend_of_a_test_c", "")
    with pytest.raises(ValueError, match="neither PLUGIN"):
        load_plugin("backend_of_a_test_c")


def test_an_import_error_inside_a_backend_is_not_taken_for_its_absence(module_backend) -> None:
    module_backend("backend_of_a_test_d", "import a_module_that_is_not_there")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        load_plugin("backend_of_a_test_d")


RECIPE = [
    "trainer.strategy=fsdp2", "trainer.flash_attn=true", "trainer.placement.colocate_all=true",
    "generator.inference_engine.weight_sync_backend=nccl", "generator.inference_engine.gpu_memory_utilization=0.8",
    "generator.inference_engine.run_engines_locally=true", "generator.inference_engine.num_engines=1",
    "generator.batched=true", "generator.inference_engine.async_engine=true", "trainer.policy.optimizer_config.lr=1e-6",
    "trainer.critic.optimizer_config.lr=1e-5", "trainer.device=cpu",
]  # fmt: skip


def test_the_usual_flags_of_a_recipe_are_each_accounted_for() -> None:
    lines: list[str] = []
    resolve(RECIPE, announce=lines.append)
    assert lines[0] == "4 keys honoured, 6 mapped, 2 unused, 0 refused"
    for argument in RECIPE:
        assert any(argument.partition("=")[0] in line for line in lines[1:]), argument


def test_what_goes_unused_for_one_reason_is_one_list() -> None:
    megatron = "trainer.policy.megatron_config."
    lines: list[str] = []
    keys = (f"{megatron}tensor_model_parallel_size=4", f"{megatron}pipeline_model_parallel_size=2")
    resolve([*keys, "trainer.device=cpu"], announce=lines.append)
    (told,) = [line for line in lines if megatron in line]
    assert told.startswith(
        f"  unused: {megatron}tensor_model_parallel_size, {megatron}pipeline_model_parallel_size: no "
    )


def test_keys_that_a_written_configuration_has_at_their_defaults_are_counted_and_not_named(tmp_path: Path) -> None:
    """And what was set is named: in the file to another value, or by an argument to any."""
    file = tmp_path / "config.yaml"
    set_first = ("trainer.device=cpu", "trainer.algorithm.gamma=0.5", "trainer.policy.megatron_config.mtp_num_layers=1")
    file.write_text(resolve(set_first, announce=lambda line: None)[0].to_yaml())
    lines: list[str] = []
    resolve([f"@{file}", "trainer.algorithm.lambd=1.0"], announce=lines.append)
    assert lines[1:-1] == [
        "  honoured: trainer.device",
        f"  unused: trainer.policy.megatron_config.mtp_num_layers: {NO_MEGATRON}",
        "  unused: trainer.algorithm.gamma: the estimator scores whole responses",
        "  unused: trainer.algorithm.lambd: only trainer.algorithm.advantage_estimator=gae reads it",
    ]
    counted = [int(number) for number in re.findall(r"\d+", lines[0])]
    assert lines[-1] == f"  not named: {sum(counted) - 4} keys that a file gives with their defaults"
    assert sum(counted) > 300


def test_keys_that_start_a_server_are_unused_where_servers_run_already() -> None:
    lines: list[str] = []
    resolve(
        [
            "generator.inference_engine.external_server_urls=grpc://h:1",
            "generator.inference_engine.engine_init_kwargs.max_model_len=9",
        ],
        announce=lines.append,
    )
    assert any("unused: generator.inference_engine.engine_init_kwargs.max_model_len" in line for line in lines)


def verdict(*argv: str) -> str:
    """What the start says of the first argument's key: honoured, mapped or unused."""
    lines: list[str] = []
    resolve(["trainer.device=cpu", *argv], announce=lines.append)
    dotted = argv[0].partition("=")[0]
    for line in lines[1:]:
        kind, _, rest = line.strip().partition(": ")
        if dotted in rest.partition(": ")[0].split(", "):
            return kind
    raise AssertionError(f"{dotted} is not accounted for in {lines}")


@pytest.mark.parametrize(
    ("argument", "others", "told"),
    [
        ("trainer.ref.model.path=a/b", "trainer.algorithm.use_kl_loss=false", "unused"),
        ("trainer.ref.model.path=a/b", "trainer.algorithm.use_kl_loss=true", "honoured"),
        ("trainer.placement.ref_num_gpus_per_node=1", "trainer.algorithm.use_kl_loss=false", "unused"),
        ("trainer.algorithm.kl_loss_coef=0.1", "trainer.algorithm.use_kl_loss=false", "unused"),
        ("trainer.algorithm.entropy_loss_coef=0.1", "trainer.seed=1", "unused"),
        ("trainer.algorithm.clip_ratio_c=2.0", "trainer.seed=1", "unused"),
        ("trainer.algorithm.clip_ratio_c=2.0", "trainer.algorithm.policy_loss_type=dual_clip", "honoured"),
        ("trainer.algorithm.max_seq_len=9", "trainer.algorithm.loss_reduction=prompt_mean", "unused"),
        ("trainer.algorithm.max_seq_len=9", "trainer.algorithm.loss_reduction=seq_mean_token_sum_norm", "honoured"),
        ("trainer.micro_train_batch_size_per_gpu=2", "trainer.max_tokens_per_microbatch=100", "unused"),
        ("trainer.micro_forward_batch_size_per_gpu=2", "trainer.max_tokens_per_microbatch=100", "unused"),
        (
            "trainer.micro_train_batch_size_per_gpu=2",
            "trainer.max_tokens_per_microbatch=100 trainer.algorithm.loss_reduction=token_mean_legacy",
            "honoured",
        ),
        (
            "trainer.ref.model.path=a/b",
            "trainer.algorithm.use_kl_loss=false trainer.algorithm.use_kl_in_reward=true",
            "honoured",
        ),
        ("trainer.algorithm.kl_ctrl.type=adaptive", "trainer.algorithm.use_kl_loss=true", "unused"),
        (
            "trainer.algorithm.kl_ctrl.horizon=5",
            "trainer.algorithm.use_kl_loss=false trainer.algorithm.use_kl_in_reward=true",
            "unused",
        ),
        (
            "trainer.algorithm.kl_ctrl.horizon=5",
            (
                "trainer.algorithm.use_kl_loss=false trainer.algorithm.use_kl_in_reward=true "
                "trainer.algorithm.kl_ctrl.type=adaptive"
            ),
            "honoured",
        ),
        ("trainer.algorithm.gamma=0.5", "trainer.algorithm.advantage_estimator=rloo", "unused"),
        ("trainer.algorithm.gamma=0.5", "trainer.algorithm.advantage_estimator=reinforce++", "honoured"),
        ("trainer.algorithm.lambd=0.5", "trainer.algorithm.advantage_estimator=reinforce++", "unused"),
        ("trainer.algorithm.grpo_norm_by_std=false", "trainer.algorithm.advantage_estimator=rloo", "unused"),
        ("trainer.algorithm.dynamic_sampling.max_sample_batches=9", "trainer.seed=1", "unused"),
        (
            "trainer.algorithm.dynamic_sampling.min_replace_ratio=0.1",
            "trainer.algorithm.dynamic_sampling.type=filter",
            "unused",
        ),
        (
            "trainer.algorithm.dynamic_sampling.min_replace_ratio=0.1",
            "trainer.algorithm.dynamic_sampling.type=replace",
            "honoured",
        ),
        ("trainer.algorithm.zero_variance_filter_tol=0.1", "trainer.seed=1", "unused"),
        ("trainer.algorithm.overlong_buffer_penalty_factor=2.0", "trainer.seed=1", "unused"),
        ("trainer.algorithm.old_logprobs=rollout", "trainer.algorithm.policy_loss_type=dppo", "unused"),
        ("trainer.algorithm.eps_clip_low=0.1", "trainer.algorithm.policy_loss_type=sapo", "unused"),
        ("trainer.algorithm.eps_clip_low=0.1", "trainer.algorithm.policy_loss_type=gspo", "honoured"),
        ("trainer.algorithm.sapo.tau_pos=2.0", "trainer.algorithm.policy_loss_type=gspo", "unused"),
        ("trainer.algorithm.sapo.tau_pos=2.0", "trainer.algorithm.policy_loss_type=sapo", "honoured"),
        ("trainer.algorithm.clip_cov.clip_ratio=0.1", "trainer.algorithm.policy_loss_type=clip_cov", "honoured"),
        (
            "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high=9",
            "trainer.algorithm.off_policy_correction.tis_ratio_type=sequence",
            "unused",
        ),
        (
            "trainer.algorithm.off_policy_correction.geo_mask_low=0.9",
            "trainer.algorithm.off_policy_correction.sequence_mask_metric=geometric",
            "honoured",
        ),
        (
            "trainer.algorithm.off_policy_correction.product_mask_low=0.4",
            "trainer.algorithm.off_policy_correction.sequence_mask_metric=geometric",
            "unused",
        ),
        ("trainer.gradient_checkpointing_use_reentrant=true", "trainer.gradient_checkpointing=false", "unused"),
        ("generator.eval_sampling_params.top_p=0.5", "trainer.eval_interval=5", "honoured"),
        ("generator.use_conversation_multi_turn=false", "generator.max_turns=1", "unused"),
        ("generator.use_conversation_multi_turn=false", "generator.max_turns=2", "honoured"),
        ("generator.chat_template.source=file", "trainer.seed=1", "unused"),
        ("trainer.max_ckpts_to_keep=2", "trainer.ckpt_interval=0", "unused"),
        ("data.dataloader.num_workers=4", "trainer.seed=1", "unused"),
    ],
)
def test_a_parameter_of_what_is_off_is_listed_as_unused(argument: str, others: str, told: str) -> None:
    assert verdict(argument, *others.split(" ")) == told


def test_settings_of_the_evaluation_are_unused_where_nothing_is_evaluated() -> None:
    never = ("trainer.eval_interval=0", "trainer.eval_before_train=false")
    assert verdict("generator.eval_sampling_params.top_p=0.5", *never) == "unused"


@pytest.mark.parametrize(
    ("argument", "server", "told"),
    [
        ("enforce_eager=true", "backend=vllm", "honoured"),
        ("enforce_eager=true", "backend=reference", "unused"),
        ("engine_init_kwargs.max_model_len=9", "backend=reference", "unused"),
        ("model_dtype=bfloat16", "backend=reference", "unused"),
        ("model_dtype=bfloat16", "server_command='serve {listen} {dtype}'", "honoured"),
        ("max_num_seqs=9", "server_command='serve {listen}'", "mapped"),
        ("backend=vllm", "server_command='serve {listen}'", "unused"),
        ("num_engines=2", "backend=reference", "honoured"),
    ],
)
def test_an_option_that_the_chosen_server_does_not_take_is_listed(argument: str, server: str, told: str) -> None:
    engine = "generator.inference_engine."
    assert verdict(engine + argument, engine + server) == told


def test_a_server_that_is_not_in_the_table_is_told_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="no such server"):
        resolve(["generator.inference_engine.backend=vlm"])


def test_a_key_is_honoured_only_where_core_and_backend_say_so() -> None:
    core = KeyReport(honoured=("a", "b"), unused={"c": "core"})
    backend = KeyReport(honoured=("a", "c"), mapped={"b": "something"}, refused={"d": "leave it out"})
    both = key_report.merged(core, backend)
    assert both == KeyReport(("a",), {"b": "something"}, {"c": "core"}, {"d": "leave it out"})


def test_what_a_backend_refuses_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = BackendPlugin(
        "strict", "x:y", report=lambda cfg, keys: KeyReport(refused={"trainer.seed": "leave it out"})
    )
    monkeypatch.setattr(backends, "_find", lambda name: plugin)
    with pytest.raises(ConfigError, match=r"trainer\.seed: leave it out"):
        resolve(["trainer.seed=1"])


def test_the_chosen_backend_stands_in_the_configuration(module_backend) -> None:
    module_backend("backend_of_a_test_e", PLUGIN_MODULE.format(name="backend_of_a_test_e"))
    cfg, _ = resolve(["trainer.override_entrypoint=backend_of_a_test_e"], announce=lambda line: None)
    assert cfg.trainer.backend == "backend_of_a_test_e"
    assert SkyRLTrainConfig().trainer.backend == "fsdp"
