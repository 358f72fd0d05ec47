"""Command line and settings: defaults of a CPU and a GPU, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from serve_process import TINY_MODEL
from skyrl_arctic_inference.cli import build_parser
from skyrl_arctic_inference.engine.identity import read_model_folder
from skyrl_arctic_inference.settings import GIB, ServeSettings, allowed_cores, default_cores

CPU = ServeSettings(model=TINY_MODEL, device="cpu")
GPU = ServeSettings(model=TINY_MODEL, device="cuda")


@pytest.fixture(scope="module")
def folder():
    return read_model_folder(TINY_MODEL)


def test_a_cpu_gets_float32_eager_a_small_cache_and_one_forked_process(folder):
    arguments = CPU.engine_arguments(folder)
    assert arguments["dtype"] == "float32" and arguments["enforce_eager"] is True
    assert arguments["kv_cache_memory_bytes"] == GIB and arguments["distributed_executor_backend"] == "uni"
    assert CPU.forks_engine and CPU.environment(Path("/x"))["TORCH_COMPILE_DISABLE"] == "1"


def test_a_gpu_keeps_the_dtype_compiles_and_takes_a_share_of_its_memory(folder):
    arguments = GPU.engine_arguments(folder)
    assert arguments["dtype"] == "auto" and arguments["enforce_eager"] is False
    assert arguments["gpu_memory_utilization"] == 0.9 and "kv_cache_memory_bytes" not in arguments
    assert not GPU.forks_engine and "OMP_NUM_THREADS" not in GPU.environment(Path("/x"))


def test_no_sampling_default_comes_from_the_models_files_and_logprobs_are_processed(folder):
    for settings in (CPU, GPU):
        arguments = settings.engine_arguments(folder)
        assert arguments["generation_config"] == "vllm" and arguments["logprobs_mode"] == "processed_logprobs"


def test_engine_arguments_reach_vllm_and_win_over_the_flags(folder):
    settings = CPU.with_engine_args({"block_size": 32, "max_model_len": 99, "enforce_eager": False})
    arguments = settings.engine_arguments(folder)
    assert (arguments["block_size"], arguments["max_model_len"], arguments["enforce_eager"]) == (32, 99, False)
    assert "TORCH_COMPILE_DISABLE" not in settings.environment(Path("/x"))


@pytest.mark.parametrize(("asked", "rank"), [(1, 1), (2, 8), (8, 8), (9, 16), (48, 64), (512, 512)])
def test_adapters_get_the_smallest_rank_of_the_kernels_that_holds_what_was_asked(folder, asked, rank):
    settings = ServeSettings(model=TINY_MODEL, device="cuda", max_loras=1, max_lora_rank=asked)
    assert settings.engine_arguments(folder)["max_lora_rank"] == rank


@pytest.mark.parametrize("asked", [0, 513])
def test_a_rank_that_no_kernel_holds_is_refused(asked):
    with pytest.raises(ValueError, match=rf"--max-lora-rank is {asked}, expected 1 to 512"):
        ServeSettings(model=TINY_MODEL, device="cuda", max_loras=1, max_lora_rank=asked)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": "x"}, "give it as --model"),
        ({"generation_config": "auto"}, "generation_config: the protocol needs"),
        ({"max_model_len": "long"}, "expected a value of type int"),
        ({"max_num_seqs": True}, "expected a value of type int"),
        ({"max_num_seqs": 0}, "--max-num-seqs is 0"),
    ],
)
def test_an_engine_argument_that_cannot_be_is_named(given, said):
    with pytest.raises(ValueError, match=said):
        CPU.with_engine_args(given)


@pytest.mark.parametrize(
    "wrong",
    [{"max_model_len": 0}, {"gpu_memory_utilization": 1.5}, {"kv_cache_gib": 0.0}, {"tensor_parallel_size": 0}],
)
def test_a_value_out_of_range_names_its_flag(wrong):
    flag = "--" + next(iter(wrong)).replace("_", "-")
    with pytest.raises(ValueError, match=flag):
        ServeSettings(model=TINY_MODEL, device="cpu", **wrong)


def test_threads_follow_omp_num_threads_and_else_take_half_of_the_cores(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert default_cores() == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "100000")
    assert default_cores() == allowed_cores()
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert default_cores() == max(allowed_cores() // 2, 1)


def test_threads_sleep_while_they_wait_unless_told_otherwise(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert CPU.environment(Path("/x"))["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert CPU.environment(Path("/x"))["OMP_WAIT_POLICY"] == "ACTIVE"


def test_engine_arguments_are_json_or_a_bare_word():
    line = ["--model", "m", "--listen", "127.0.0.1:0", "--engine-arg", "a=1", "--engine-arg", 'b={"c": [2]}']
    args = build_parser().parse_args([*line, "--engine-arg", "d=word"])
    assert args.engine_arg == [("a", 1), ("b", {"c": [2]}), ("d", "word")]
