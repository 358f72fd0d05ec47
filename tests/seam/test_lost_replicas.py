"""One of two servers is killed in mid-generation and comes back: the run ends as if nothing had happened."""

import asyncio
import signal
import time
from pathlib import Path

import pytest
from skyrl_rollout.client import RolloutClient
from skyrl_rollout.reference.process import ReferenceServer
from test_backends_agree import FIVE_STEPS, exported
from training_run import ROOT, TrainingRun
from vllm_server import TINY_MODEL

STEPS = 8
KILLED_IN, BACK_AT = 3, 6
SERVER = ("--model", str(TINY_MODEL), "--token-delay-ms", "4")  # a sample takes a while, and does not know the weights


def run_on(folder: Path, *servers: ReferenceServer) -> TrainingRun:
    urls = ",".join(f"'{server.url}'" for server in servers)
    return TrainingRun(
        folder,
        *FIVE_STEPS,
        f"trainer.max_training_steps={STEPS}",
        f"trainer.hf_save_interval={STEPS}",
        "trainer.train_batch_size=4",
        "trainer.policy_mini_batch_size=4",
        "generator.n_samples_per_prompt=2",
        "generator.sampling_params.max_generate_length=160",
        "generator.sampling_params.additional_kwargs={min_tokens: 140}",
        f"generator.inference_engine.external_server_urls=[{urls}]",
    ).start(PYTHONPATH=str(ROOT / "tests/seam"))


def wait_until_it_makes_tokens(server: ReferenceServer) -> None:
    async def busy() -> None:
        async with await RolloutClient.connect(server.url) as client:
            async for status in client.watch_status(0.05):
                if status.running:
                    return

    asyncio.run(busy())
    time.sleep(0.45)  # 64 tokens make an event


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_every_sample_is_accounted_for_when_a_server_is_killed_and_restarted(tmp_path: Path) -> None:
    with ReferenceServer(*SERVER) as one, ReferenceServer(*SERVER) as two:
        whole = run_on(tmp_path / "whole", one, two)
        assert whole.wait(120) == 0, whole.output[-4000:]
    with ReferenceServer(*SERVER) as one, ReferenceServer(*SERVER) as two:
        run = run_on(tmp_path / "disturbed", one, two)
        run.wait_for_step(KILLED_IN - 1)
        wait_until_it_makes_tokens(two)
        two.kill()
        run.wait_for_step(BACK_AT - 1)
        run.signal(signal.SIGSTOP)  # so that the server is back for the last steps, however long it takes to start
        with ReferenceServer(*SERVER, listen=two.url.removeprefix("grpc://")) as back:
            run.signal(signal.SIGCONT)
            assert run.wait(120) == 0, run.output[-4000:]
            assert back.alive
    steps = run.steps()
    assert sorted(steps) == list(range(1, STEPS + 1))
    assert steps[KILLED_IN]["rollouts/num_moved_samples"] > 0, "tokens that had arrived were kept"
    assert steps[KILLED_IN]["rollouts/num_servers_missed_publish"] == 1 and "gets no work until it has it" in run.output
    assert steps[STEPS]["rollouts/num_servers_away"] == steps[STEPS]["rollouts/num_servers_stale"] == 0
    assert run.rewards() == whole.rewards()
    ours, theirs = exported(run, STEPS), exported(whole, STEPS)
    assert all((ours[name] == tensor).all() for name, tensor in theirs.items()), "the same samples, to the last bit"
