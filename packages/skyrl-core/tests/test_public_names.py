"""A public entrypoint's name stands for keys, under those that the user gives."""

from __future__ import annotations

import importlib.util

import pytest
from skyrl.train.backends import backend_name_from_argv, resolve
from skyrl.train.entrypoints.public_names import PUBLIC_ENTRYPOINTS, selected_by, selection

DAPO = "examples.train.algorithms.dapo.main_dapo"


@pytest.mark.parametrize("name", [name for name in PUBLIC_ENTRYPOINTS if name.startswith("skyrl.")])
def test_a_name_in_this_packages_namespace_is_a_module_to_start(name: str) -> None:
    assert importlib.util.find_spec(name) is not None


def test_dapos_own_defaults_hold_through_its_name_only_and_under_the_users_keys() -> None:
    def buffer(*argv: str) -> int:
        return resolve(argv, announce=lambda line: None)[0].trainer.algorithm.overlong_buffer_len

    assert buffer() == 0
    assert buffer(f"trainer.override_entrypoint={DAPO}") == 512
    assert buffer("trainer.algorithm.overlong_buffer_len=64", f"trainer.override_entrypoint={DAPO}") == 64


def test_a_name_leaves_the_backend_free() -> None:
    assert backend_name_from_argv([f"trainer.override_entrypoint={DAPO}"]) == "fsdp"
    assert backend_name_from_argv([f"trainer.override_entrypoint={DAPO}", "trainer.backend=other"]) == "other"


def test_what_a_name_selects_and_what_it_brings_is_told_at_the_start() -> None:
    lines: list[str] = []
    resolve([f"trainer.override_entrypoint={DAPO}"], announce=lines.append)
    told = "mapped: trainer.override_entrypoint: selects trainer.algorithm.overlong_buffer_len=512"
    assert any(told in line for line in lines)
    lines.clear()
    resolve(["trainer.override_entrypoint=examples.train.multiply.main_multiply"], announce=lines.append)
    assert any("the environment 'multiply' of that module: register yours" in line for line in lines)


@pytest.mark.parametrize(
    "written",
    ["examples/train/visgym/entrypoint.py", "$(cd $(dirname $0)/.. && pwd)/examples/train/visgym/entrypoint.py",
     "examples.train.visgym.entrypoint"],
)  # fmt: skip
def test_a_file_of_a_checkout_is_the_module_of_that_name(written: str) -> None:
    assert "VisGym" in selection(written).brings


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no public entrypoint of that name; known: .*did you mean .*main_dapo"):
        selected_by("examples.train.algorithms.dapo.main_dapos")
