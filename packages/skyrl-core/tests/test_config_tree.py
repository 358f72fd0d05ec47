"""Every key of the public tree: its type, its default, and what is told where its value cannot be honoured."""

from __future__ import annotations

import csv
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from skyrl.train.backends import resolve
from skyrl.train.config import SkyRLTrainConfig, inert, known_keys, public_flags, schema
from skyrl.train.config.build import build
from skyrl.train.config.differences import differences
from skyrl.train.config.known_keys import RENAMED
from skyrl.train.config.overrides import parse
from skyrl.train.config.problems import ConfigError

# Type of the public tree -> (values that it takes, values that it does not), as arguments.
PROBES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "int": (("3",), ("abc", "true", "1.5", "[1]")),
    "float": (("0.5", "1"), ("abc", "true", "[1]")),
    "bool": (("true", "false"), ("abc", "2", "[1]")),
    "str": (("abc",), ("[1]", "{a: 1}")),
    "dict": (("{a: 1}",), ("abc", "1")),
    "Dict[str, Any]": (("{a: 1}",), ("abc", "1")),
    "List[str]": (("[a,b]",), ("{a: 1}",)),
    "List[int]": (("[0,1]",), ("abc", "[a]")),
    "List[float]": (("[0.5,0.9]",), ("abc", "[a,b]")),
    "Union[bool, int]": (("true", "2"), ("abc",)),
}
DIFFERENT = {row.key for row in differences()}
NEVER_NULL = ("trainer.policy.model.path",)  # a run has a policy


def public_types() -> dict[str, str]:
    text = resources.files("skyrl.train.config").joinpath("public_keys.tsv").read_text()
    return {row[0]: row[1] for row in list(csv.reader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))[1:]}


TYPED = [name for name in public_types() if schema.find(SkyRLTrainConfig, tuple(name.split("."))) is not None]


def built(argument: str) -> Any:
    return build(SkyRLTrainConfig, parse([argument])).cfg


def problem_of(argument: str) -> str | None:
    try:
        built(argument)
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", TYPED)
def test_a_key_takes_the_values_of_its_public_type_and_no_others(name: str) -> None:
    declared = public_types()[name]
    inner = declared.removeprefix("Optional[").removesuffix("]") if declared.startswith("Optional[") else declared
    if inner != declared and name not in NEVER_NULL:
        built(f"{name}=null")
    if name in DIFFERENT:
        return
    taken, refused = PROBES.get(inner, ((), ()))
    for value in taken:
        told = problem_of(f"{name}={value}")  # a bound or a choice of ours, not a type
        assert told is None or re.search(r"expected (at least|at most|more than|less than|one of)", told)
    for value in refused:
        with pytest.raises(ConfigError, match=re.escape(name)):
            built(f"{name}={value}")


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("trainer.mtp.enabled=true", "no multi-token-prediction head is trained here"),
        ("trainer.policy.model.fake_int4_qat.enabled=true", "no training on weights rounded to int4 here"),
        ("trainer.ref.model.fake_int4_qat.enabled=true", "trainer.ref.model.fake_int4_qat.enabled=true: no training"),
        ("trainer.policy.torch_profiler_config.enable=true", "no profile is taken here"),
        ("trainer.policy.inference_only_init=true", "a policy without an optimizer is not built here"),
        ("generator.vision_language_generator=true", "no vision-language model is trained here"),
        ("generator.inference_engine.enable_pd=true", "no servers that only prefill or only decode here"),
        ("generator.inference_engine.enable_return_routed_experts=true", "are not replayed in training here"),
        (
            "generator.inference_engine.pipeline_parallel_size=2",
            "no servers of several stages here",
        ),
        ("harbor_trial_config.trials_dir=/x", "harbor_trial_config.trials_dir: Harbor, which runs these trials"),
        ("generator.miniswe_config_path=/x", "mini-SWE-agent, which runs these trajectories"),
        ("generator.inference_engine.thunder_agent_port=1", "ThunderAgent, which schedules these programs"),
        ("generator.enable_child_agents=true", "the generator of recursive agents is not part of this project"),
        ("trainer.num_dummy_steps=5", "an entrypoint of one's own declares it"),
    ],
)
def test_what_needs_an_engine_that_is_not_here_is_refused_with_one_sentence(argument: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve([argument], announce=lambda line: None)
    (problem,) = caught.value.problems
    assert told in problem and problem.startswith(argument.partition("=")[0])


def test_several_keys_of_one_engine_are_refused_together() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(["harbor_trial_config.trials_dir=/x", "generator.rate_limit.enabled=true"])
    told = "Harbor, which runs these trials, is not part of this project"
    assert caught.value.problems == (f"harbor_trial_config.trials_dir, generator.rate_limit.enabled: {told}",)


def test_what_goes_with_megatron_is_refused_as_megatron() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(["trainer.strategy=megatron", "trainer.mtp.enabled=true"])
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    "argument",
    [
        "trainer.policy.megatron_config.tensor_model_parallel_size=4",
        "trainer.policy.megatron_config.optimizer_config_kwargs.any=1",
        "trainer.ref.megatron_config.ddp_config.grad_reduce_in_fp32=false",
        "generator.inference_engine.weight_transfer_threshold_cuda_ipc_GB=2.0",
        "generator.inference_engine.router_init_kwargs.policy=x",
        "generator.inference_engine.delta_weight_sync.cloud_download_workers=2",
        "trainer.policy.sequence_parallel_size=2",
        "trainer.eval_batch_size=3",
    ],
)
def test_an_inert_key_is_listed_with_its_reason_and_read_all_the_same(argument: str) -> None:
    lines: list[str] = []
    cfg, _ = resolve([argument, "trainer.device=cpu"], announce=lines.append)
    name, _, value = argument.partition("=")
    assert f"  unused: {name}: {inert.why_inert(name)}" in lines
    part: Any = cfg
    for each in name.split("."):
        part = part[each] if isinstance(part, dict) else getattr(part, each)
    assert str(part).lower() == value


def test_no_row_of_the_inert_table_is_left_over() -> None:
    names = schema.key_names(SkyRLTrainConfig)
    for pattern in inert.INERT:
        assert any(inert.fnmatch.fnmatchcase(name, pattern) for name in names), pattern


# Keys under another name, which `build.py` translates, and keys that are still only known by name.
OTHER_NAMES = {*RENAMED, "trainer.algorithm.use_tis", "trainer.algorithm.tis_imp_ratio_cap",
               "trainer.log_example_interval"}  # fmt: skip
BY_NAME = re.compile(r"trainer\.ref\.model\.lora\.|fully_sharded_loras")  # listed whatever their value


def test_every_public_key_is_typed_or_has_another_name() -> None:
    missing = {name for name in public_types() if not BY_NAME.search(name)} - set(TYPED) - OTHER_NAMES
    assert missing == set()


def test_the_page_for_users_of_public_skyrl_has_the_tables_of_the_code() -> None:
    page = (Path(__file__).parents[1] / "docs" / "from-skyrl.md").read_text()
    assert public_flags.brought_up_to_date(page) == page
    for name in public_types():
        elsewhere = inert.why_inert(name) or known_keys.verdict(tuple(name.split(".")), 0)
        assert f"`{name.rsplit('.', 1)[-1]}`" in page or name in page or elsewhere
