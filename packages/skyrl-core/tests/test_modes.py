"""Every `trainer.mode` as a small run: what is trained on, how old it is, and how a run ends that cannot go on."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from skyrl.train.environments import EnvironmentFailed
from skyrl.train.failures import RunFailed
from skyrl.train.generator.draft import UnknownVersion
from skyrl.train.generator.drops import NothingLeft
from small_runs import BACKENDS, QUICKSTART, CodesEnv, Ran, arguments, run

A, F = "trainer.algorithm", "trainer.fully_async"
# Five batches; the first twelve prompts begin with 1, so that their samples do not differ.
PROMPTS = [f"{n}+{n % 7}=" for n in (*range(10, 20), 1, 11, *range(20, 48))]
ON_ROLLOUT = (f"{A}.policy_loss_type=rollout_is", f"{A}.eps_clip_low=1.0", f"{A}.eps_clip_high=1e9")


def fully_async(staleness: int, workers: int = 0) -> tuple[str, ...]:
    return (
        f"{F}.enabled=true", f"{F}.max_staleness_steps={staleness}",
        f"{F}.num_parallel_generation_workers={workers or 8 * (staleness + 1)}", *ON_ROLLOUT,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    CodesEnv.held, CodesEnv.broken, CodesEnv.unscored = set(), False, set()
    CodesEnv.released.clear()


@pytest.fixture
def start(reference_url: str) -> Any:
    def begin(*overrides: str, backend: str = "fsdp", **options: Any) -> Ran:
        return run(arguments(reference_url, f"trainer.backend={backend}", *overrides), **options)

    return begin


@pytest.fixture
def few_prompts(tmp_path: Path) -> str:
    file = tmp_path / "few.jsonl"
    file.write_text("".join(json.dumps({"prompt": [{"role": "user", "content": p}]}) + "\n" for p in PROMPTS))
    return f"data.train_data={file}"


def equal(first: Ran, second: Ran) -> bool:
    return all(torch.equal(first.weights[name], second.weights[name]) for name in first.weights)


def tokens(ran: Ran) -> list[list[list[int]]]:
    return [[t.response_token_ids.tolist() for t in batch] for batch in ran.batches]


def test_without_staleness_a_fully_asynchronous_run_is_the_plain_one_bit_for_bit(start: Any) -> None:
    plain = start(*ON_ROLLOUT, "trainer.run_name=plain")
    asynchronous = start(*fully_async(0))
    assert tokens(asynchronous) == tokens(plain) and asynchronous.uids() == plain.uids()
    assert equal(plain, asynchronous)
    assert asynchronous.column("async/staleness_max") == [0, 0, 0]
    assert "async/staleness_max" not in plain.rows[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_are_made_ahead_up_to_the_bound_and_each_prompt_is_trained_on_once(start: Any, backend: str) -> None:
    ran = start(*fully_async(2), "trainer.max_training_steps=6", backend=backend)
    assert max(ran.column("async/staleness_max")) in (1, 2) and ran.column("async/staleness_max")[0] == 0
    for row, batch in zip(ran.rows, ran.batches, strict=True):
        versions = {int(v) for t in batch for v in t.weight_versions}
        first = row["trainer/weight_version"] - row["step"]  # what step 1 began with
        assert min(versions) == first + row["step"] - 1 - row["async/staleness_max"]
        assert 0 <= row["async/staleness_min"] <= row["async/staleness_mean"] <= row["async/staleness_max"]
        assert row["async/keep_rate"] == 1 and row["async/num_groups_dropped"] == 0
    assert max(ran.column("async/gen_buffer_qsize_at_wait_start")) > 0
    counts = Counter(uid for uids in ran.uids() for uid in uids)
    assert len(counts) == 6 * 8 and set(counts.values()) == {1}


def test_a_group_over_the_bound_is_thrown_away_counted_and_sampled_anew(start: Any) -> None:
    straight = start(*ON_ROLLOUT, "trainer.run_name=plain", "trainer.max_training_steps=1")
    slow = straight.batches[0][0]
    CodesEnv.held = {slow.messages[0]["content"]}
    ran = start(
        *fully_async(1), "trainer.max_training_steps=6",
        on_step=lambda step: CodesEnv.released.set() if step == 4 else None,
    )  # fmt: skip
    assert sum(ran.column("async/staleness_violation_count")) == 1
    assert max(ran.column("async/staleness_max")) <= 1
    counts = Counter(uid for uids in ran.uids() for uid in uids)
    assert counts[f"{slow.id.uid}#2"] == 1 and slow.id.uid not in counts
    assert len(counts) == 6 * 8


def test_full_batches_leave_out_groups_without_a_difference(start: Any) -> None:
    ran = start(*fully_async(1), f"{A}.zero_variance_filter=true", f"{F}.sample_full_batch=true")
    assert sum(ran.column("async/num_groups_dropped")) > 0 and min(ran.column("async/keep_rate")) < 1
    assert sum(ran.column("reward/num_zero_variance_filtered")) == 0
    assert all(len(uids) == 8 for uids in ran.uids())


@pytest.mark.ci
def test_full_batches_end_the_run_where_the_prompts_are_used_up(start: Any, few_prompts: str) -> None:
    ran = start(
        *fully_async(1), f"{A}.zero_variance_filter=true", f"{F}.sample_full_batch=true", few_prompts,
        "trainer.epochs=1", "trainer.max_training_steps=null", "trainer.ckpt_interval=100",
    )  # fmt: skip
    assert (len(ran.rows), ran.trainer.total_steps) == (3, 5)  # 28 of 40 prompts are useful
    assert ran.trainer.store.steps() == [3]


@pytest.mark.parametrize("mode", [("trainer.mode=one_step_off",), fully_async(1)], ids=["one_step_off", "fully_async"])
def test_an_error_of_a_rollout_ends_the_run_as_it_is(start: Any, mode: tuple[str, ...]) -> None:
    def breaks(step: int) -> None:
        CodesEnv.broken = step == 1

    with pytest.raises(EnvironmentFailed, match="the judge is away"):
        start(*mode, "trainer.max_training_steps=9", on_step=breaks)


class Unversioned:
    """A trainer whose generator does not say which weights sampled a token."""

    async def collect(self, tasks: Any, step: int) -> Any:
        trajectories = await super().collect(tasks, step)  # type: ignore[misc]
        for t in trajectories:
            t.weight_versions[:] = -1
        return trajectories


@pytest.mark.parametrize("mode", [("trainer.mode=plain",), fully_async(1)], ids=["plain", "fully_async"])
def test_tokens_of_an_unknown_version_are_not_trained_on(start: Any, mode: tuple[str, ...]) -> None:
    with pytest.raises(UnknownVersion, match=r"prompt \d+, sample 0: \d+ of \d+ tokens that would be trained on"):
        start(*mode, "trainer.rollout_wait_timeout_s=2.0", trainer=Unversioned)


class EndsInOrder:
    """A trainer whose groups end with what they have when they are cancelled; `late` are those begun after that."""

    over, late = False, 0

    async def collect(self, tasks: Any, step: int) -> Any:
        EndsInOrder.late += EndsInOrder.over
        try:
            return await super().collect(tasks, step)  # type: ignore[misc]
        except asyncio.CancelledError:
            EndsInOrder.over = True
            raise NothingLeft("cancelled") from None


def test_no_group_is_begun_once_the_run_ends(start: Any, few_prompts: str) -> None:
    EndsInOrder.over, EndsInOrder.late = False, 0
    CodesEnv.held = set(PROMPTS[30:])  # some of them are on their way when the run ends

    def breaks(step: int) -> None:
        if step == 1:
            raise RunFailed("the disk is full")

    with pytest.raises(RunFailed, match="the disk is full"):
        start(*fully_async(1), few_prompts, on_step=breaks, trainer=EndsInOrder)
    CodesEnv.released.set()
    assert EndsInOrder.over and EndsInOrder.late == 0


@pytest.mark.ci
def test_groups_without_a_scored_sample_are_dropped_one_by_one_and_end_the_run_as_a_batch(
    start: Any, few_prompts: str
) -> None:
    keys = (*fully_async(0), few_prompts, "environment.on_error=drop", "trainer.epochs=1")
    two = start(*keys, "trainer.max_training_steps=1", "trainer.run_name=first").uids()[0][:2]
    CodesEnv.unscored = {PROMPTS[int(uid)] for uid in two}
    ran = start(*keys, "trainer.max_training_steps=3")
    assert sum(ran.column("async/num_groups_dropped")) >= 2 and min(ran.column("async/keep_rate")) < 1
    assert not set(two) & {uid for uids in ran.uids() for uid in uids}
    CodesEnv.unscored = set(PROMPTS)
    with pytest.raises(RunFailed, match=r"all 2 samples were left out \(environment\.on_error=drop\)"):
        start(*keys, "trainer.run_name=unscored")


@pytest.mark.parametrize(
    ("mode", "named"),
    [
        (("trainer.mode=plain",), "the rollouts of step 1: nothing arrived within 1 s"),
        (("trainer.mode=one_step_off",), "the rollouts of step 1: nothing arrived within 1 s"),
        (fully_async(0), r"the groups of step 1 \(groups 0/8, 8 on their way\): nothing arrived within 1 s"),
    ],
    ids=["plain", "one_step_off", "fully_async"],
)
def test_a_wait_has_a_deadline_and_a_name(start: Any, few_prompts: str, mode: tuple[str, ...], named: str) -> None:
    CodesEnv.held = set(PROMPTS)
    with pytest.raises(RunFailed, match=rf"{named} \(trainer\.rollout_wait_timeout_s\)"):
        start(*mode, few_prompts, "trainer.rollout_wait_timeout_s=1.0")
    CodesEnv.released.set()


def test_one_step_off_has_one_version_a_batch_that_of_two_steps_before(start: Any) -> None:
    ran = start("trainer.mode=one_step_off", "trainer.max_training_steps=4")
    begun = ran.rows[0]["trainer/weight_version"] - 1
    assert [row["generate/weight_version_min"] - begun for row in ran.rows] == [0, 0, 1, 2]
    assert ran.column("generate/weight_version_min") == ran.column("generate/weight_version_max")
    again = start("trainer.mode=one_step_off", "trainer.max_training_steps=4", "trainer.run_name=again")
    assert tokens(again) == tokens(ran) and equal(ran, again)


def test_weights_move_between_the_batches_of_one_step_off_only(start: Any) -> None:
    turns = ("generator.max_turns=2", "generator.max_input_length=60", "trainer.max_training_steps=2")
    slow = start(*turns, "trainer.run_name=plain").batches[1][0]
    CodesEnv.held = {slow.messages[0]["content"]}
    release = threading.Timer(1.5, CodesEnv.released.set)  # a turn of the second batch ends long after the first update
    ran = start("trainer.mode=one_step_off", *turns, on_step=lambda step: release.start() if step == 0 else None)
    assert ran.rows[1]["generate/weight_version_min"] == ran.rows[1]["generate/weight_version_max"]
    assert ran.rows[0]["timing/sync_weights"] > 0.5


@pytest.mark.ci
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_step_off_resumes_bit_for_bit(start: Any, backend: str) -> None:
    mode = ("trainer.mode=one_step_off", "trainer.ckpt_interval=2")
    straight = start(*mode, "trainer.max_training_steps=4", "trainer.run_name=straight", backend=backend)
    checkpoint = straight.trainer.store.path(2)
    assert (checkpoint / "rollouts_ahead.npz").is_file()
    resume = ("trainer.resume_mode=from_path", f"trainer.resume_path={checkpoint}")
    resumed = start(*mode, "trainer.max_training_steps=4", *resume, backend=backend)
    assert tokens(resumed) == tokens(straight)[2:] and equal(straight, resumed)
    with pytest.raises(
        ValueError, match=r"trainer\.mode=plain: the checkpoint is of a run with trainer\.mode=one_step_off"
    ):
        start("trainer.mode=plain", "trainer.ckpt_interval=2", *resume, backend=backend)


@pytest.mark.ci
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_resumed_fully_asynchronous_run_trains_on_each_prompt_of_the_epochs_once(
    start: Any, few_prompts: str, backend: str
) -> None:
    mode = (*fully_async(2), "trainer.ckpt_interval=3", few_prompts, "trainer.epochs=2", "trainer.max_ckpts_to_keep=-1")
    first = start(*mode, "trainer.max_training_steps=6", "trainer.run_name=first", backend=backend)
    resume = ("trainer.resume_mode=from_path", f"trainer.resume_path={first.trainer.store.path(3)}")
    resumed = start(*mode, "trainer.max_training_steps=null", *resume, backend=backend)
    counts = Counter(uid.partition("@")[0] for uids in [*first.uids()[:3], *resumed.uids()] for uid in uids)
    assert len(resumed.rows) == 10 - 3 and counts == {str(n): 2 for n in range(40)}
    assert resumed.rows[-1]["trainer/epoch"] == 1


@pytest.mark.ci
def test_dynamic_sampling_goes_one_step_ahead_too(start: Any) -> None:
    keys = (f"{A}.dynamic_sampling.type=filter", f"{A}.dynamic_sampling.max_sample_batches=9")
    ran = start("trainer.mode=one_step_off", *keys)
    plain = start(*keys, "trainer.run_name=plain")
    assert all(row["dynamic_sampling/num_useful_prompts"] >= 8 for row in ran.rows)
    assert tokens(ran)[0] == tokens(plain)[0]


@pytest.mark.ci
def test_a_simulated_run_publishes_weights_that_do_not_change(start: Any) -> None:
    simulated = (f"{F}.simulate_training=true", f"{F}.simulate_training_step_seconds=0.2")
    ran = start(*fully_async(1), *simulated, f"{F}.simulate_weight_sync_seconds=0.1")
    untrained = load_file(QUICKSTART / "tiny_model" / "model.safetensors")
    assert all(torch.equal(tensor, ran.weights[name]) for name, tensor in untrained.items())
    assert min(ran.column("timing/train_critic_and_policy")) >= 0.2 and min(ran.column("timing/sync_weights")) >= 0.1
    assert len(set(ran.column("trainer/weight_version"))) == 3


@pytest.mark.ci
@pytest.mark.parametrize("mode", [("trainer.mode=one_step_off",), fully_async(1)], ids=["one_step_off", "fully_async"])
def test_evaluation_and_the_kl_to_a_reference_work_beside_running_rollouts(start: Any, mode: tuple[str, ...]) -> None:
    ran = start(*mode, "trainer.eval_interval=2", f"{A}.use_kl_loss=true", "trainer.max_training_steps=2")
    training = [row for row in ran.rows if "reward/avg_raw_reward" in row]
    assert len(training) == 2 and all("policy/policy_kl" in row for row in training)
    assert any("eval/all/avg_score" in row for row in ran.rows)


@pytest.mark.ci
@pytest.mark.parametrize("mode", [("trainer.mode=one_step_off",), fully_async(1)], ids=["one_step_off", "fully_async"])
def test_an_epoch_ends_with_what_is_trained_on_not_with_what_is_read(
    start: Any, few_prompts: str, mode: tuple[str, ...]
) -> None:
    keys = (few_prompts, "trainer.epochs=2", "trainer.max_training_steps=7", f"{A}.use_kl_loss=true")
    ran = start(*mode, *keys, "trainer.update_ref_every_epoch=true", "trainer.policy.optimizer_config.lr=1e-2")
    assert ran.column("trainer/epoch")[:4] == [0] * 4 and ran.column("trainer/epoch")[6] == 1
    assert "one_step" not in mode[0] or ran.column("trainer/epoch") == [0] * 5 + [1] * 2
    followed = [row["step"] for row in ran.rows if "timing/update_ref_with_policy" in row]
    assert len(followed) == 1 and (followed == [5] if "one_step" in mode[0] else 5 <= followed[0] <= 6)


@pytest.mark.ci
def test_the_example_of_a_fully_asynchronous_run_trains(reference_url: str) -> None:
    example = Path(__file__).parents[1] / "examples" / "fully_async.yaml"
    ran = run(
        [
            f"@{QUICKSTART / 'embedded.yaml'}", f"@{example}", "trainer.max_training_steps=3", "trainer.logger=jsonl",
            f"generator.inference_engine.external_server_urls={reference_url}", "trainer.eval_before_train=false",
            "trainer.eval_interval=0", "trainer.progress=false",
        ]
    )  # fmt: skip
    assert len(ran.rows) == 3 and all("async/staleness_mean" in row for row in ran.rows)
