"""How prompts become trajectories: token in, token out, turn by turn, with an environment that answers and scores.

Tokens are never turned into text and back. The first turn of a group is one request for all its samples, later turns
are one request each; every request's seed follows from (run seed, step, phase, prompt, turn).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np
from skyrl_rollout.errors import DeadlineExceeded, RolloutError
from skyrl_rollout.tokens import FinishReason, Generation, LogprobMode, Sample, Sampling

from skyrl.train import environments, plugins
from skyrl.train.environments import EnvironmentFailed, EnvironmentThreads, Episode
from skyrl.train.generator.chat import ChatFormat, Tokenizer
from skyrl.train.generator.concurrency import Slots, all_of
from skyrl.train.generator.draft import TrajectoryDraft
from skyrl.train.generator.drops import Drops, require_some
from skyrl.train.generator.sampling import logprob_mode, to_sampling
from skyrl.train.generator.trajectory import PromptTask, Trajectory
from skyrl.train.rollouts.members import server_urls
from skyrl.train.seeds import derive

log = logging.getLogger(__name__)
R = TypeVar("R")
OnProgress = Callable[[int, int], None]

# A request that holds slots ends by its own deadline; whoever waits for them waits a little longer.
SLOT_MARGIN_S = 60.0


class SamplingPool(Protocol):
    """What is needed of a `skyrl_rollout.pool.RolloutPool`."""

    def highest_version(self) -> int: ...

    async def generate(
        self,
        prompt_token_ids: np.ndarray,
        sampling: Sampling,
        *,
        mode: LogprobMode,
        num_samples: int,
        min_weight_version: int | None,
        timeout_s: float,
        affinity: str,
    ) -> Generation: ...


@dataclass(frozen=True)
class _Round:
    """What is the same for every trajectory of one `generate` call; `reasons` grows by each sample that is left out."""

    sampling: Sampling
    mode: LogprobMode
    step: int
    phase: str
    min_version: int
    reasons: list[str] = field(default_factory=list)


@dataclass
class _Rollout:
    """One trajectory on its way."""

    task: PromptTask
    repetition: int
    episode: Episode
    draft: TrajectoryDraft
    messages: list[dict[str, str]]
    started: float

    @property
    def where(self) -> str:
        return _sample_name(self.task, self.repetition)


class EnvGenerator:
    """Rolls out prompts against a pool of rollout servers.

    `train_sampling` and `eval_sampling` are the sampling parameters of the two phases. Subclasses may override
    `roll_out`, which makes the trajectories of one prompt.
    """

    def __init__(self, cfg: Any, tokenizer: Tokenizer, pool: SamplingPool) -> None:
        gen = cfg.generator
        self.cfg, self.pool = cfg, pool
        self.train_sampling = to_sampling(gen.sampling_params, key="generator.sampling_params")
        self.eval_sampling = to_sampling(gen.eval_sampling_params, key="generator.eval_sampling_params")
        self.chat = ChatFormat.from_config(gen, tokenizer)
        self.threads = EnvironmentThreads(cfg.environment.skyrl_gym.max_env_workers)
        self.drops = Drops(cfg.environment.on_error)
        self._said_sampling_mode = False
        self._slots = Slots(self._samples_at_once())  # of all calls: several may run at the same time
        plugins.import_plugins(cfg.environment.plugins)
        if cfg.environment.reward:
            environments.use_reward(cfg.environment.reward)

    async def generate(
        self,
        tasks: Sequence[PromptTask],
        *,
        n_samples: int,
        sampling: Sampling,
        step: int,
        phase: str,
        on_progress: OnProgress | None = None,
    ) -> list[Trajectory]:
        """All samples of all prompts, prompt-major: the n samples of the first prompt come first. With
        `environment.on_error=drop` those that could not be scored are missing.

        on_progress(done, total) counts trajectories. Raises EnvironmentFailed, UnknownVersion or RolloutError, each
        naming the sample; the other rollouts of the call are then ended. RunFailed where every sample was left out.
        """
        environments.require({task.env_class for task in tasks})
        total, done = len(tasks) * n_samples, 0
        version = self.pool.highest_version()
        self._slots.limit = self._samples_at_once()
        round_ = _Round(sampling, self._mode(sampling), step, phase, version)

        def one_more() -> None:
            nonlocal done
            done += 1
            if on_progress is not None:
                on_progress(done, total)

        groups = await all_of([self.roll_out(task, n_samples, round_, one_more) for task in tasks])
        trajectories = [trajectory for group in groups for trajectory in group]
        require_some(len(trajectories), total, round_.reasons)
        return trajectories

    def metrics(self, phase: str) -> dict[str, float]:
        """What happened in that phase since this was asked last and no trajectory tells."""
        return {"generate/num_dropped_samples": float(self.drops.taken(phase))} if self.drops.allowed else {}

    async def roll_out(
        self, task: PromptTask, n_samples: int, round_: _Round, on_done: Callable[[], None]
    ) -> list[Trajectory]:
        """The n trajectories of one prompt, in order of repetition, but for those that are left out."""

        def guarded(work: Coroutine[Any, Any, R]) -> Coroutine[Any, Any, R | None]:
            return self.drops.guard(work, round_.phase, round_.reasons, on_done)

        rollouts: list[_Rollout] = []
        try:
            begun = (guarded(self._start(task, repetition, rollouts)) for repetition in range(n_samples))
            started = [r for r in await all_of(begun) if r is not None]
            first = await self._first_turns(started, round_)
            ended = await all_of(
                guarded(self._finish(r, s, round_, on_done)) for r, s in zip(started, first, strict=True)
            )
            return [trajectory for trajectory in ended if trajectory is not None]
        finally:
            await asyncio.gather(*(r.episode.abandon() for r in rollouts if not r.episode.finished))

    async def _start(self, task: PromptTask, repetition: int, rollouts: list[_Rollout]) -> _Rollout:
        """A rollout whose environment has begun; it is added to `rollouts`, which are closed whatever happens."""
        started = time.perf_counter()
        cfg = self.cfg.environment
        episode, messages = await Episode.start(
            task.env_class,
            [dict(m) for m in task.messages],
            where=_sample_name(task, repetition),
            env_config=getattr(cfg.skyrl_gym, task.env_class, {}),
            extras=task.env_extras | {"max_turns": self.cfg.generator.max_turns},
            threads=self.threads,
            timeout_s=cfg.step_timeout_s,
        )
        draft = TrajectoryDraft(self.chat.prompt_ids(messages))
        draft.seconds["env"] += time.perf_counter() - started
        rollout = _Rollout(task, repetition, episode, draft, list(messages), started)
        rollouts.append(rollout)
        longest = self.cfg.generator.max_input_length
        if draft.num_input_tokens > longest:
            raise EnvironmentFailed(
                f"environment {task.env_class!r} began {rollout.where} with {draft.num_input_tokens} tokens, more than "
                f"generator.max_input_length={longest}: raise that key or have it begin with less"
            )
        return rollout

    async def _first_turns(self, rollouts: list[_Rollout], round_: _Round) -> list[Sample]:
        """One request for all samples whose environment begins with the same prompt: usually the whole group."""
        same_prompt: dict[bytes, list[_Rollout]] = defaultdict(list)
        for rollout in rollouts:
            same_prompt[rollout.draft.prompt_token_ids.tobytes()].append(rollout)
        requests = [self._sample(group, round_, turn=1) for group in same_prompt.values()]
        samples = {
            rollout.repetition: sample
            for group, answer in zip(same_prompt.values(), await all_of(requests), strict=True)
            for rollout, sample in zip(group, answer, strict=True)
        }
        return [samples[rollout.repetition] for rollout in rollouts]

    async def _finish(
        self, rollout: _Rollout, sample: Sample, round_: _Round, on_done: Callable[[], None]
    ) -> Trajectory:
        """Turn after turn until the environment is done, the turns are used up or the context is full."""
        draft, turn = rollout.draft, 1
        while True:
            observations = await self._take_turn(rollout, sample, round_, turn)
            if observations is None or turn == self.cfg.generator.max_turns:
                break
            if not self._observe(rollout, sample, observations):
                draft.stop_reason = "length"
                break
            turn += 1
            (sample,) = await self._sample([rollout], round_, turn=turn)
        started = time.perf_counter()
        env_metrics = await rollout.episode.finish()
        now = time.perf_counter()
        draft.seconds["env"] += now - started
        draft.seconds["completion"] = now - rollout.started
        on_done()
        trajectory = draft.finish(rollout.task, rollout.repetition, env_metrics=env_metrics, messages=rollout.messages)
        return self._filtered(trajectory)

    async def _take_turn(
        self, rollout: _Rollout, sample: Sample, round_: _Round, turn: int
    ) -> list[dict[str, str]] | None:
        """Adds a sampled turn and its reward; the observations to answer next, None where the episode is over."""
        draft, where = rollout.draft, f"{rollout.where}, turn {turn}"
        draft.add_turn(sample, min_version=round_.min_version, where=where)
        draft.stop_reason = "stop" if sample.finish_reason.is_stop else "length"
        action = self.chat.text(sample.token_ids)
        started = time.perf_counter()
        answer = await rollout.episode.step(action)
        draft.seconds["env"] += time.perf_counter() - started
        draft.add_reward(answer.reward)
        rollout.messages += [{"role": "assistant", "content": action}, *answer.observations]
        if answer.action not in (None, action):
            raise EnvironmentFailed(
                f"environment {rollout.task.env_class!r} on {where} replaced the answer's text: tokens are trained on "
                "as they were sampled, so have it end turns with generator.sampling_params.stop instead"
            )
        return None if answer.done else answer.observations

    def _observe(self, rollout: _Rollout, sample: Sample, observations: list[dict[str, str]]) -> bool:
        """Adds the observations to the context, if a next turn fits into it."""
        draft, reason = rollout.draft, sample.finish_reason
        ended = reason in (FinishReason.EOS, FinishReason.STOP_TOKEN)
        token_ids = self.chat.observation_ids(observations, draft.last_token, ended=ended)
        if draft.num_input_tokens + len(token_ids) > self.cfg.generator.max_input_length:
            return False
        if ended and not self.chat.conversation:
            draft.drop_last_token()
        draft.add_observation(token_ids)
        return True

    async def _sample(self, group: list[_Rollout], round_: _Round, *, turn: int) -> tuple[Sample, ...]:
        """One request: a sample for each rollout of the group, which share their context."""
        task, draft = group[0].task, group[0].draft
        timeout_s = self.cfg.generator.inference_engine.request_timeout_s
        # A later turn, or a group that its environment split, is told apart by its first sample.
        parts: list[int | str] = [round_.step, round_.phase, task.uid, turn, group[0].repetition]
        sampling = replace(round_.sampling, seed=derive(self.cfg.trainer.seed, *parts))
        name = f"turn {turn} of prompt {task.uid} ({len(group)} samples, {draft.num_input_tokens} tokens of context)"
        async with self._slots.hold(len(group), name=name, timeout_s=timeout_s + SLOT_MARGIN_S):
            started = time.perf_counter()
            try:
                generation = await self.pool.generate(
                    draft.input_token_ids,
                    sampling,
                    mode=round_.mode,
                    num_samples=len(group),
                    min_weight_version=round_.min_version,
                    timeout_s=timeout_s,
                    affinity=f"{round_.step}/{round_.phase}/{task.uid}",
                )
            except RolloutError as error:
                raise _explained(error, name, timeout_s) from error
        for rollout in group:
            rollout.draft.seconds["llm"] += time.perf_counter() - started
        for sample in generation.samples:
            if sample.finish_reason in (FinishReason.ABORTED, FinishReason.PAUSED, FinishReason.VERSION_CHANGED):
                raise RolloutError(
                    f"{name}: the server ended it early ({sample.finish_reason.name}), on another's request"
                )
        return generation.samples

    def _mode(self, sampling: Sampling) -> LogprobMode:
        mode = logprob_mode(sampling)
        if mode is LogprobMode.SAMPLING and not self._said_sampling_mode:
            self._said_sampling_mode = True
            log.warning(
                "sampling is cut or penalised (top_k, top_p, min_p, a penalty or a bias): rollout logprobs are those "
                "of the distribution drawn from, and differ from the policy's own"
            )
        return mode

    def _samples_at_once(self) -> int:
        engine = self.cfg.generator.inference_engine
        return engine.max_num_seqs * (len(server_urls(engine.external_server_urls)) or engine.num_servers)

    def _filtered(self, trajectory: Trajectory) -> Trajectory:
        """`zero_reward_on_non_stop` and `apply_overlong_filtering`, for a rollout that did not end by itself."""
        gen = self.cfg.generator
        if trajectory.stop_reason != "stop":
            if gen.zero_reward_on_non_stop:
                trajectory.rewards = np.zeros_like(trajectory.rewards)
            if gen.apply_overlong_filtering:
                trajectory.loss_mask = np.zeros_like(trajectory.loss_mask)
        return trajectory


def _sample_name(task: PromptTask, repetition: int) -> str:
    return f"prompt {task.uid}, sample {repetition}"


def _explained(error: RolloutError, name: str, timeout_s: float) -> RolloutError:
    """The same error, saying what was waited for."""
    late = ""
    if isinstance(error, DeadlineExceeded):
        late = f": no answer within {timeout_s:g} s (generator.inference_engine.request_timeout_s)"
    return type(error)(f"{name}{late}: {error.message}", code=error.code, reason=error.reason, details=error.details)
