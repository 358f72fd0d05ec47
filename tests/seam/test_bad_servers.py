"""A server that is wrong, dead or dying ends the run with a sentence and leaves nothing behind."""

import signal
import time
from pathlib import Path

import psutil
import pytest
from skyrl.train.launch.server import free_port
from skyrl_rollout.reference.process import ReferenceServer
from test_resume import run_of, start
from training_run import TrainingRun, all_gone
from vllm_server import TINY_MODEL


def external(folder: Path, url: str) -> TrainingRun:
    return start(run_of(folder, f"generator.inference_engine.external_server_urls=[{url}]"))


def assert_refused(run: TrainingRun, *words: str, timeout_s: float = 60) -> None:
    code = run.wait(timeout_s)
    assert code not in (0, None)
    for word in words:
        assert word in run.output, f"{word!r} is missing from:\n{run.output[-3000:]}"
    assert "Traceback" not in run.output


@pytest.mark.ci
def test_a_dead_endpoint_is_named_within_ten_seconds(tmp_path: Path) -> None:
    url = f"grpc://127.0.0.1:{free_port()}"
    run = external(tmp_path, url)
    run.wait_for_output("honoured")
    started = time.monotonic()
    assert_refused(run, url)
    assert time.monotonic() - started < 20, "10 s for the endpoint, the rest for loading the model beside it"


@pytest.mark.ci
def test_an_http_url_is_refused_with_the_grpc_form(tmp_path: Path) -> None:
    assert_refused(external(tmp_path, "http://127.0.0.1:8000"), "http://127.0.0.1:8000", "grpc://127.0.0.1:8000")


@pytest.mark.ci
def test_a_server_of_another_model_is_listed_tensor_by_tensor(tmp_path: Path) -> None:
    with ReferenceServer() as server:  # its built-in layout, not the tiny model's
        assert_refused(external(tmp_path, server.url), "serves another model", "self_attn.q_proj.weight", "[128, 128]")


@pytest.mark.ci
def test_a_server_that_dies_during_start_up_shows_its_last_lines(tmp_path: Path) -> None:
    command = "python3 -c \"import sys; print('no room for the cache'); sys.exit(3)\" {model} {listen}"
    run = start(run_of(tmp_path, f"generator.inference_engine.server_command={command}"))
    assert_refused(run, "no room for the cache", "3")


@pytest.mark.ci
@pytest.mark.timeout(200)
@pytest.mark.parametrize("own", [True, False])
def test_a_server_that_dies_during_the_run_ends_it(tmp_path: Path, own: bool) -> None:
    with ReferenceServer("--model", str(TINY_MODEL), "--logits", "canary") as server:
        if own:
            run = start(run_of(tmp_path, "generator.inference_engine.backend=reference"))
        else:
            run = external(tmp_path, server.url)
        run.wait_for_step(3)
        children = run.descendants()
        victim = server.pid if not own else next(p.pid for p in children if "reference" in " ".join(p.cmdline()))
        psutil.Process(victim).send_signal(signal.SIGKILL)
        assert_refused(run, "server", timeout_s=100)
        assert not all_gone(children)


@pytest.mark.ci
def test_sigkill_of_the_trainer_ends_its_server(tmp_path: Path) -> None:
    run = start(run_of(tmp_path, "generator.inference_engine.backend=reference"))
    run.wait_for_step(2)
    children = run.descendants()
    assert children
    run.kill()
    assert not all_gone(children)


@pytest.mark.ci
@pytest.mark.timeout(200)
def test_sigkill_of_the_trainer_ends_vllm_and_its_engine(tmp_path: Path) -> None:
    run = TrainingRun(tmp_path, "trainer.eval_interval=-1", "trainer.eval_before_train=false").start()
    run.wait_for_step(2, timeout_s=150)
    children = run.descendants()
    assert len(children) >= 2, "the front and its engine"
    run.kill()
    assert not all_gone(children, timeout_s=30)
