"""The training loop: collect rollouts, score them, estimate advantages, update, publish, and report.

It knows no engine and no optimizer: rollouts come from a `RolloutService` over gRPC, updates go to a `PolicyGroup`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from skyrl.train import checkpoints, dumps, metrics
from skyrl.train.algorithms import advantages, kl_in_reward, reward_shaping
from skyrl.train.algorithms.anchors import needs_old_logprobs, sampled_logprobs
from skyrl.train.algorithms.dynamic_sampling import DynamicSampling
from skyrl.train.display.closing import StepRow
from skyrl.train.display.progress import Progress
from skyrl.train.evaluating import evaluate
from skyrl.train.failures import RunFailed
from skyrl.train.generator import step_wise
from skyrl.train.generator.draft import require_versions
from skyrl.train.generator.metrics import generation_metrics
from skyrl.train.generator.trajectory import PromptTask, Trajectory
from skyrl.train.policy.batch import TrajectoryBatch
from skyrl.train.policy.contract import LossSpec, Role
from skyrl.train.reference import FollowingReference
from skyrl.train.rollouts.logprob_gap import logprob_gap_metrics
from skyrl.train.seeds import derive
from skyrl.train.sources.source import PromptsUsedUp
from skyrl.train.sources.table import SOURCES

R = TypeVar("R")


@dataclass
class TrainingResult:
    """What a run did: one row per step, the last step, and the files it left (name -> path)."""

    rows: list[StepRow] = field(default_factory=list)
    last_step: int = 0
    files: dict[str, Path] = field(default_factory=dict)


class RayPPOTrainer:
    """One run from its first publish to its last checkpoint. Subclasses may override any step of the loop."""

    def __init__(
        self,
        cfg: Any,
        *,
        policy: Any,
        reference: Any | None,
        critic: Any | None = None,
        rollouts: Any,
        generator: Any,
        tokenizer: Any,
        train_loader: Any,
        eval_dataset: Any | None,
        trackers: Any,
        progress: Progress,
    ) -> None:
        self.cfg, self.tokenizer = cfg, tokenizer
        self.policy, self.reference, self.critic = policy, reference, critic
        self.following = FollowingReference(policy, reference, follows=cfg.trainer.update_ref_every_epoch)
        self.rollouts, self.generator = rollouts, generator
        self.train_loader, self.eval_dataset = train_loader, eval_dataset
        self.trackers, self.progress = trackers, progress
        self.n_samples = cfg.generator.n_samples_per_prompt
        self.temperature = cfg.trainer.algorithm.temperature
        self.loss = LossSpec(algorithm=cfg.trainer.algorithm, temperature=self.temperature)
        self.store = checkpoints.CheckpointStore(
            Path(cfg.trainer.ckpt_path).expanduser(), keep=cfg.trainer.max_ckpts_to_keep
        )
        self.export_folder = Path(cfg.trainer.export_path).expanduser()
        self.total_steps = training_steps(cfg, len(train_loader))
        self.result = TrainingResult()
        self.kl_coefficient = cfg.trainer.algorithm.kl_loss_coef  # of the KL penalty on the reward
        self.publish_metrics: dict[str, float] = {}  # of the last publish
        self.shaping_metrics: dict[str, float] = {}  # of this step: what was done to its rewards and masks
        self.timers = metrics.StepTimers()  # of this step
        self.sampling_metrics: dict[int, dict[str, float]] = {}  # step -> of its dynamic sampling
        self.source = SOURCES[cfg.trainer.mode](self)
        # One thread for all policy work: the event loop stays free for heartbeats while torch computes.
        self._policy_thread = ThreadPoolExecutor(1, thread_name_prefix="policy")

    async def train(self) -> TrainingResult:
        """Runs all steps. Whatever happens, the last whole checkpoint is the place to resume from."""
        first_step = await self.restore() + 1
        await self.publish(step=first_step - 1)
        if self.cfg.trainer.eval_before_train and first_step == 1:
            self.trackers.log(await self.evaluate(step=0), 0)
        self.source.begin(first_step)
        try:
            for step in range(first_step, self.total_steps + 1):
                if self.source.used_up:
                    break
                await self.train_step(step)
        except PromptsUsedUp:
            await self.end_early()
        except BaseException:
            self.tell_where_to_go_on()
            raise
        finally:
            await self.source.close()
        self.progress.waiting_for("the end of the run")
        return self.result

    async def train_step(self, step: int) -> None:
        timers = self.timers = metrics.StepTimers()
        started, self.shaping_metrics = time.perf_counter(), {}
        with timers.phase("step"):
            with timers.phase("generate"):
                trajectories = await self.source.take(step)
                require_versions(trajectories)
            with timers.phase("convert_to_training_input"):
                batch = self.batch_of(trajectories)
            with timers.phase("postprocess_generator_output"):
                batch = self.shape(batch)
            with timers.phase("fwd_logprobs_values_reward"):
                batch = await self.score(batch)
            if self.cfg.trainer.algorithm.use_kl_in_reward:
                batch = self.apply_reward_kl_penalty(batch)
            with timers.phase("compute_advantages_and_returns"):
                batch = self.advantages(batch)
            with timers.phase("train_critic_and_policy"):
                update_metrics = await self.update(batch)
            with timers.phase("sync_weights"):
                await self.source.before_publish()
                await self.publish(step=step)
                self.source.published(step)
        seconds = time.perf_counter() - started
        row = self.step_metrics(step, trajectories, batch, seconds) | update_metrics
        self.record(step, row, seconds)
        self.show_and_dump(step, trajectories, batch)
        row |= await self.after_step(step, timers)
        self.trackers.log(row | timers.metrics(), step)

    # The parts of a step

    async def collect_batch(self, step: int) -> list[Trajectory]:
        """What the step trains on: the samples of one batch of prompts or, with dynamic sampling, of as many batches as
        it takes to find `train_batch_size` prompts that teach something."""
        settings = self.cfg.trainer.algorithm.dynamic_sampling
        if settings.type is None:
            return await self.collect(self.train_loader.next_batch(), step)
        seed = derive(self.cfg.trainer.seed, "dynamic_sampling", step)
        sampling = DynamicSampling(settings, batch_size=self.cfg.trainer.train_batch_size, seed=seed)
        while sampling.trajectories is None:
            sampling.take(await self.collect(sampling.ask(self.train_loader.next_batch()), step))
        self.sampling_metrics[step] = sampling.metrics
        return sampling.trajectories

    async def collect(self, tasks: Sequence[PromptTask], step: int) -> list[Trajectory]:
        """All samples of the batch, prompt-major."""
        return await self.generator.generate(
            tasks,
            n_samples=self.n_samples,
            sampling=self.generator.train_sampling,
            step=step,
            phase="train",
            on_progress=self.source.moved,
        )

    def batch_of(self, trajectories: Sequence[Trajectory]) -> TrajectoryBatch:
        """The samples that are trained on: each trajectory, or each of its turns."""
        generator = self.cfg.generator
        if not generator.step_wise_trajectories:
            return TrajectoryBatch.from_trajectories(trajectories)
        steps = step_wise.steps_of(trajectories)
        samples = step_wise.merged(steps) if generator.merge_stepwise_output else steps
        self.shaping_metrics |= step_wise.counts(steps, samples)
        return TrajectoryBatch.from_trajectories(samples, step_wise=True)

    def shape(self, batch: TrajectoryBatch) -> TrajectoryBatch:
        """Rewards and masks as the algorithm wants them, before anything is computed from them."""
        longest = self.cfg.generator.sampling_params.max_generate_length
        batch, found = reward_shaping.shape(batch, self.cfg.trainer.algorithm, max_response_len=longest)
        self.shaping_metrics |= found
        return batch

    async def score(self, batch: TrajectoryBatch) -> TrajectoryBatch:
        """The critic's values, if there is one; old logprobs of the current policy, if any part of the update looks at
        them, and with a KL term the reference's."""
        if self.critic is not None:
            self.progress.waiting_for("values of the critic")
            values = await self.on_policy_thread(self.critic.values, batch)
            batch = batch.with_tensors(values_T=require_numbers(values, batch, of="critic"))
        if not needs_old_logprobs(self.cfg.trainer.algorithm):
            pass
        elif self.cfg.trainer.algorithm.old_logprobs == "rollout":
            batch = batch.with_tensors(old_logprobs_T=rollout_logprobs(batch))
        else:
            self.progress.waiting_for("logprobs of the policy")
            old = await self.on_policy_thread(self.policy.logprobs, batch, temperature=self.temperature)
            batch = batch.with_tensors(old_logprobs_T=require_numbers(old, batch))
        if self.reference is not None:
            self.progress.waiting_for("logprobs of the reference")
            ref = await self.on_policy_thread(self.reference.logprobs, batch, temperature=self.temperature)
            batch = batch.with_tensors(ref_logprobs_T=require_numbers(ref, batch, of="ref"))
        return batch

    def apply_reward_kl_penalty(self, batch: TrajectoryBatch) -> TrajectoryBatch:
        """The KL to the reference leaves each token's reward; the coefficient then follows what was measured."""
        algorithm = self.cfg.trainer.algorithm
        batch, found = kl_in_reward.penalise(batch, algorithm, self.kl_coefficient)
        self.shaping_metrics |= found
        self.kl_coefficient = kl_in_reward.next_coefficient(
            self.kl_coefficient, found["loss/avg_kl"], batch.num_sequences, algorithm
        )
        return batch

    def advantages(self, batch: TrajectoryBatch) -> TrajectoryBatch:
        return advantages.estimate(batch, self.cfg.trainer.algorithm)

    async def update(self, batch: TrajectoryBatch) -> dict[str, float]:
        """One optimizer step per mini-batch of prompts, `update_epochs_per_batch` times over the batch; first of the
        critic, then of the policy."""
        self.rollouts.server_alive_or_raise()  # before work whose weights nobody could take
        trainer, out = self.cfg.trainer, dict[str, float]()
        parts = (("critic", self.critic, trainer.critic_mini_batch_size),) if self.critic is not None else ()
        for name, group, size in (*parts, ("policy", self.policy, trainer.policy_mini_batch_size)):
            self.progress.waiting_for(f"the {name} update")
            started, rows = time.perf_counter(), []
            for _ in range(trainer.update_epochs_per_batch):
                for minibatch in minibatches(batch, size):
                    rows.append(await self.on_policy_thread(group.update, minibatch, self.loss))
            out |= metrics.mean_over_minibatches(rows) | {f"timing/{name}_train": time.perf_counter() - started}
        return out

    async def publish(self, *, step: int) -> None:
        """The server's weights become the policy's; returns once every replica serves them."""
        self.progress.waiting_for(f"publishing the weights of step {step}")
        report = await self.rollouts.publish(self.policy, step=step)
        self.publish_metrics = metrics.publish_metrics(report)

    async def evaluate(self, step: int) -> dict[str, float]:
        """Rewards on the evaluation set under the evaluation's own sampling parameters."""
        if self.eval_dataset is None:
            return {}
        with self.timers.phase("eval_generate"):
            row, trajectories, dump = await evaluate(
                self.cfg,
                generator=self.generator,
                dataset=self.eval_dataset,
                tokenizer=self.tokenizer,
                progress=self.progress,
                step=step,
            )
        self.track_rollouts("eval", step, trajectories, self.cfg.trainer.num_logger_eval_samples)
        if dump is not None:
            self.result.files["evaluation rollouts"] = dump
        return row

    @property
    def prompts_used_up(self) -> bool:
        """Whether dynamic sampling has gone through all epochs, maybe before the planned number of steps."""
        loader = self.train_loader
        if self.cfg.trainer.algorithm.dynamic_sampling.type is None:
            return False
        return loader.epoch * len(loader) + loader.position >= self.cfg.trainer.epochs * len(loader)

    async def after_step(self, step: int, timers: metrics.StepTimers) -> dict[str, float]:
        """Evaluation, checkpoint and export where the step is due for one."""
        trainer, last = self.cfg.trainer, step == self.total_steps or self.source.used_up
        out: dict[str, float] = {}
        if due(step, trainer.eval_interval, last):
            with timers.phase("eval"):
                out = await self.evaluate(step)
        read, batches = self.source.trained_through(), len(self.train_loader)
        if not last and self.following.is_due(read, batches):
            self.progress.waiting_for("the reference, which follows the policy")
            with timers.phase("update_ref_with_policy"):  # before the checkpoint, which holds it
                await self.on_policy_thread(self.following.follow, read, batches, through=self.store.folder)
        if due(step, trainer.ckpt_interval, last):
            with timers.phase("save_checkpoints"):
                await self.save_checkpoint(step)
        if due(step, trainer.hf_save_interval, last):
            with timers.phase("save_hf_model"):
                await self.export(step)
        return out

    async def end_early(self) -> None:
        """What is due after the last step, where only the next one could tell that it was the last."""
        step, trainer = self.result.last_step, self.cfg.trainer
        self.progress.note(f"all epochs are through after step {step}, before the planned {self.total_steps} steps")
        if trainer.eval_interval > 0 and step % trainer.eval_interval:
            self.trackers.log(await self.evaluate(step), step)
        if trainer.ckpt_interval > 0 and step % trainer.ckpt_interval:
            await self.save_checkpoint(step)
        if trainer.hf_save_interval > 0 and step % trainer.hf_save_interval:
            await self.export(step)

    # State

    async def restore(self) -> int:
        """The step to go on from: 0 for a fresh run."""
        folder = checkpoints.find_resume(
            self.store,
            mode=self.cfg.trainer.resume_mode,
            resume_path=self.cfg.trainer.resume_path,
        )
        if folder is None:
            if (aside := self.store.set_aside()) is not None:
                self.progress.note(f"{self.store.folder} held another run's checkpoints: moved to {aside}")
            self.progress.resume_at(0, self.total_steps)
            return 0
        state = checkpoints.read_state(folder)
        self.progress.note(f"resuming at step {state['global_step']} from {folder}")
        changed = checkpoints.changed_settings(folder, self.cfg.to_yaml())
        if self.cfg.trainer.resume_mode == "latest":
            checkpoints.require_same_run(folder, changed)
        if changed:
            self.progress.note("changed since: " + ", ".join(f"{key}: {how}" for key, how in changed.items()))
        self.train_loader.load_state_dict(state["train_loader"])
        self.source.load(checkpoints.state_of_mode(state, self.cfg.trainer.mode), folder)
        for name, group in self.trained().items():
            for note in await self.on_policy_thread(group.load, folder / name):
                self.progress.note(note)
        await self.on_policy_thread(self.following.load, folder, state.get("reference_epochs", 0))
        self.result.rows = [StepRow(**row) for row in state["rows"]]
        self.kl_coefficient = kl_in_reward.resumed_coefficient(
            state.get("kl_coefficient", self.kl_coefficient), self.cfg.trainer.algorithm
        )
        self.result.last_step = state["global_step"]
        self.progress.resume_at(state["global_step"], self.total_steps)
        return state["global_step"]

    def tell_where_to_go_on(self) -> None:
        """The newest checkpoint that this run made, on the way out of whatever cut the run off."""
        if (newest := self.result.files.get("checkpoint")) is not None:
            with contextlib.suppress(OSError):  # of a terminal that is gone: what ended the run matters more
                self.progress.note(f"newest checkpoint: {newest}; trainer.resume_mode=latest goes on from it")

    async def save_checkpoint(self, step: int) -> None:
        self.progress.waiting_for(f"the checkpoint of step {step}")
        state = {
            "train_loader": self.source.loader_state(),
            "mode": self.cfg.trainer.mode,
            "source": self.source.state(),
            "rows": [vars(row) for row in self.result.rows],
            "kl_coefficient": self.kl_coefficient,
            "reference_epochs": self.following.epochs,
        }
        path = await self.on_policy_thread(
            self.store.save,
            step,
            write=self._save,
            state=state,
            config_yaml=self.cfg.to_yaml(),
        )
        self.result.files["checkpoint"] = path

    def _save(self, folder: Path) -> None:
        for name, group in self.trained().items():
            group.save(folder / name)
        self.following.save(folder)
        self.source.save(folder)

    def trained(self) -> dict[str, Any]:
        """What is updated, saved and exported, by the name of its folder."""
        return {"policy": self.policy} | ({"critic": self.critic} if self.critic is not None else {})

    async def export(self, step: int) -> None:
        """A Hugging Face folder of the policy, and one of the critic, each complete before it gets its name."""
        self.progress.waiting_for(f"the export of step {step}")
        for name, group in self.trained().items():
            final = self.export_folder / f"global_step_{step}" / name
            await self.on_policy_thread(self._export, group, final)
            of = "" if name == "policy" else f" of the {name}"
            self.result.files[f"Hugging Face export{of}"] = final

    def _export(self, group: Any, final: Path) -> None:
        def write(folder: Path) -> None:
            group.save_hf(folder)
            self.tokenizer.save_pretrained(folder)

        checkpoints.replace_folder(final, write)

    # Reports

    def step_metrics(
        self,
        step: int,
        trajectories: Sequence[Trajectory],
        batch: TrajectoryBatch,
        seconds: float,
    ) -> dict[str, float]:
        return {
            **metrics.reward_metrics(trajectories, self.n_samples),
            **metrics.batch_metrics(batch),
            **self.shaping_metrics,
            **self.sampling_metrics.pop(step, {}),
            **generation_metrics(trajectories),
            **self.generator.metrics("train"),
            **logprob_gap_metrics(batch),
            **self.publish_metrics,
            **self.rollouts.metrics(),
            "trainer/global_step": step,
            "trainer/epoch": self.train_loader.epoch,
            "trainer/weight_version": self.rollouts.version,
            "trainer/tokens_per_second_per_gpu": metrics.tokens_per_second(batch, seconds, self.policy.num_workers),
            **self.source.metrics(),
        }

    def record(self, step: int, row: dict[str, float], seconds: float) -> None:
        self.result.last_step = step
        self.result.rows.append(
            StepRow(
                step,
                row[f"reward/avg_pass_at_{self.n_samples}"],
                row["reward/avg_raw_reward"],
                seconds,
            )
        )
        self.progress.step_done(step, reward=row["reward/avg_raw_reward"], seconds=seconds)

    def show_and_dump(self, step: int, trajectories: Sequence[Trajectory], batch: TrajectoryBatch) -> None:
        """One example as text, rollouts as a table and the batch as files, where the config asks for them."""
        if due(step, self.cfg.trainer.print_example_interval, last=False):
            self.progress.note(dumps.example(trajectories[0], self.tokenizer))
        self.track_rollouts("train", step, trajectories, self.cfg.trainer.num_logger_train_samples)
        if self.cfg.trainer.dump_data_batch:
            dumps.dump_trajectories(self.export_folder, step, trajectories, self.tokenizer)
            self.result.files["training batches"] = dumps.dump_batch(self.export_folder, step, batch).parent

    def track_rollouts(self, phase: str, step: int, trajectories: Sequence[Trajectory], most: int) -> None:
        """The first `most` rollouts as the trackers' table `trajectories/<phase>`; none where `most` is 0 or less."""
        if most > 0:
            rows = dumps.table_rows(step, trajectories[:most], self.tokenizer)
            self.trackers.table(f"trajectories/{phase}", rows, step)

    async def on_policy_thread(self, work: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Runs blocking policy work off the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._policy_thread, lambda: work(*args, **kwargs))


def training_steps(cfg: Any, steps_per_epoch: int) -> int:
    """`trainer.max_training_steps` if set, else epochs x batches per epoch."""
    all_epochs = cfg.trainer.epochs * steps_per_epoch
    limit = cfg.trainer.max_training_steps
    return all_epochs if limit is None else min(limit, all_epochs)


def require_numbers(values_T: torch.Tensor, batch: TrajectoryBatch, *, of: Role = "policy") -> torch.Tensor:
    """[T]: the logprobs of policy or reference, or the critic's values, as they are. RunFailed where the weights of
    that role give none: no later step would mend them."""
    trained_T = batch.loss_mask_T > 0
    broken = int((trained_T & values_T.isnan()).sum())
    if broken:
        said = "values" if of == "critic" else "logprobs"
        mend = (
            "give another trainer.ref.model.path"
            if of == "ref"
            else f"lower trainer.{of}.optimizer_config.lr and start from an export before that"
        )
        raise RunFailed(
            f"the {'reference' if of == 'ref' else of}'s {said} of {broken} of {int(trained_T.sum())} sampled tokens "
            f"are not numbers: its weights are broken, by the last update or from the start; {mend}"
        )
    return values_T


def rollout_logprobs(batch: TrajectoryBatch) -> torch.Tensor:
    """[T]: the servers' own logprobs as the old ones. ValueError where a server could not say one."""
    return sampled_logprobs(batch, key="trainer.algorithm.old_logprobs=rollout", instead="set it to recompute")


def due(step: int, interval: int, last: bool) -> bool:
    """Whether an interval action happens after `step`: every `interval` steps and after the last; never if <= 0."""
    return interval > 0 and (last or step % interval == 0)


def minibatches(batch: TrajectoryBatch, prompts_per_minibatch: int) -> list[TrajectoryBatch]:
    """The batch cut into mini-batches of whole groups, in order of their first appearance."""
    groups: dict[int, list[int]] = {}
    for s, g in enumerate(batch.group_ids_S.tolist()):
        groups.setdefault(g, []).append(s)
    rows = list(groups.values())
    cuts = [rows[i : i + prompts_per_minibatch] for i in range(0, len(rows), prompts_per_minibatch)]
    return [batch.select([s for group in cut for s in group]) for cut in cuts]
