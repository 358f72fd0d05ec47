"""The plain entrypoint: `python -m skyrl.train.entrypoints.main_base key=value ... @run.yaml`, with `--check` to see
what it would run.

A script of one's own registers its environments or losses, subclasses `BasePPOExp` where it wants other parts, and
calls `main(exp_cls=..., parts=...)`, or `BasePPOExp(cfg).run()` with a configuration of its own.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from skyrl.train import backends
from skyrl.train.backends import BackendPlugin, import_attribute
from skyrl.train.config import SkyRLTrainConfig, combine_parts, make_config
from skyrl.train.config.help_text import render
from skyrl.train.entrypoints.exits import run_to_exit

log = logging.getLogger("skyrl.train.entrypoints.main_base")  # also when run by -m

CLOSE_TIMEOUT_S = 30.0
CHECK = "--check"


class BasePPOExp:
    """One run, from its configuration to its result. Each `get_` builds one part, and a subclass may build another.

    `plugin` is the backend; unset, it is looked up by `cfg.trainer.backend`. A subclass may name a trainer or a
    generator of its own (`trainer_cls`, `generator_cls`): it stands before the backend's.
    """

    trainer_cls: type | None = None
    generator_cls: type | None = None

    def __init__(self, cfg: SkyRLTrainConfig, plugin: BackendPlugin | None = None) -> None:
        self.cfg = cfg
        self.plugin = plugin or backends.load_plugin(cfg.trainer.backend)

    @property
    def generates_only(self) -> bool:
        """Whether nothing is trained (`trainer.mode=generate`)."""
        return self.cfg.trainer.mode == "generate"

    # Parts

    def get_model_folder(self) -> Path:
        """The policy's checkpoint on this machine."""
        from skyrl.train.entrypoints.model_folder import model_folder

        return model_folder(self.cfg.trainer.policy.model.path, key="trainer.policy.model.path")

    def get_tokenizer(self) -> Any:
        """The policy's tokenizer. ValueError where its folder has none."""
        from transformers import AutoTokenizer

        folder = self.get_model_folder()
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, use_fast=not self.cfg.trainer.disable_fast_tokenizer)
        except Exception as error:
            raise ValueError(f"trainer.policy.model.path={folder}: its tokenizer cannot be loaded: {error}") from error
        if len(tokenizer) <= len(tokenizer.all_special_ids):  # made up by transformers where there are no files
            raise ValueError(f"trainer.policy.model.path={folder}: there is no tokenizer in it: save it there too")
        return tokenizer

    def get_train_dataset(self, tokenizer: Any) -> Any:
        """The prompts of `data.train_data`."""
        from skyrl.train.data.prompts import PromptDataset

        return PromptDataset.from_config(self.cfg, tokenizer, "train")

    def get_eval_dataset(self, tokenizer: Any) -> Any | None:
        """The prompts of `data.val_data`; None where nothing is ever evaluated."""
        from skyrl.train.data.prompts import PromptDataset

        trainer = self.cfg.trainer
        evaluates = trainer.eval_interval > 0 or trainer.eval_before_train or self.generates_only
        if not evaluates or not self.cfg.data.val_data:
            return None
        return PromptDataset.from_config(self.cfg, tokenizer, "val")

    def get_train_loader(self, dataset: Any) -> Any:
        """The order in which prompts are trained on."""
        from skyrl.train.data.loader import PromptLoader

        return PromptLoader(dataset, self.cfg.trainer.train_batch_size, seed=self.cfg.trainer.seed)

    def get_generator(self, tokenizer: Any, pool: Any) -> Any:
        """What makes trajectories of prompts against a pool of rollout servers."""
        cls = in_front_of(self.generator_cls, import_attribute(self.plugin.generator_cls))
        return cls(self.cfg, tokenizer, pool)

    def get_trackers(self) -> Any:
        """The sinks of `trainer.logger`."""
        from skyrl.train.trackers import open_trackers

        return open_trackers(self.cfg, self.cfg.trainer.log_folder)

    def get_trainer(self, **parts: Any) -> Any:
        """The loop over these parts; see `RayPPOTrainer`."""
        return in_front_of(self.trainer_cls, import_attribute(self.plugin.trainer_cls))(self.cfg, **parts)

    # The run

    def run(self) -> Any:
        """Trains to the end, or generates once, and reports. Whatever happens, everything that it started is ended when
        it returns."""
        from skyrl.train.entrypoints import run_folders

        with run_folders.held(self.cfg):
            tokenizer = self.get_tokenizer()
            if self.generates_only:
                work = self._generate(tokenizer, self.get_eval_dataset(tokenizer))
            else:
                loader = self.get_train_loader(self.get_train_dataset(tokenizer))
                work = self._run(tokenizer, loader, self.get_eval_dataset(tokenizer))
            runner = asyncio.Runner()
            result = runner.run(work)
            # Only after success: on the way out of an error a thread may still compute, and this waits for it.
            runner.close()
            self.report(result)
            return result

    def report(self, result: Any) -> None:
        """The closing table, the reward curve and the files of the run; of a run that only generates, its metrics."""
        from skyrl.train.display.closing import print_closing, print_metrics, save_reward_curve

        if self.generates_only:
            print_metrics(*result)
            return
        files = dict(result.files)
        if result.rows:
            curve = self.cfg.trainer.log_folder / "reward_curve.png"
            save_reward_curve(result.rows, curve)
            files["reward curve"] = curve
        print_closing(
            result.rows, n_samples=self.cfg.generator.n_samples_per_prompt, files=files, last_step=result.last_step
        )

    async def _run(self, tokenizer: Any, loader: Any, eval_dataset: Any | None) -> Any:
        from skyrl.train.display.progress import Progress
        from skyrl.train.launch.server import end_all
        from skyrl.train.trainer import training_steps

        total_steps, limit = training_steps(self.cfg, len(loader)), self.cfg.trainer.max_training_steps
        if limit is not None and total_steps < limit:
            log.info("trainer.epochs=%d end after %d steps, before %d", self.cfg.trainer.epochs, total_steps, limit)
        async with AsyncExitStack() as stack:
            stack.callback(end_all)  # entered first: it ends what an interrupted start left behind
            trackers = self.get_trackers()
            stack.push(lambda _type, error, _traceback: trackers.close(told(error)))
            progress = stack.enter_context(Progress(total_steps, enabled=self.cfg.trainer.progress))
            rollouts, policy, reference, critic = await self._open(stack, total_steps, progress.waiting_for)
            trainer = self.get_trainer(
                policy=policy,
                reference=reference,
                critic=critic,
                rollouts=rollouts,
                generator=self.get_generator(tokenizer, rollouts.pool),
                tokenizer=tokenizer,
                train_loader=loader,
                eval_dataset=eval_dataset,
                trackers=trackers,
                progress=progress,
            )
            return await trainer.train()

    async def _generate(self, tokenizer: Any, dataset: Any) -> tuple[dict[str, float], dict[str, Path]]:
        """(metrics, files); no policy is loaded, and nothing is published: the servers keep their weights."""
        from skyrl.train.display.progress import Progress
        from skyrl.train.evaluating import generate_only
        from skyrl.train.launch.server import end_all
        from skyrl.train.rollouts.service import RolloutService

        async with AsyncExitStack() as stack:
            stack.callback(end_all)
            trackers = self.get_trackers()
            stack.push(lambda _type, error, _traceback: trackers.close(told(error)))
            progress = stack.enter_context(Progress(0, enabled=self.cfg.trainer.progress))
            rollouts = await RolloutService.open(
                self.cfg, self.get_model_folder(), on_wait=progress.waiting_for, control=False
            )
            stack.push_async_callback(rollouts.close)
            return await generate_only(
                self.cfg,
                generator=self.get_generator(tokenizer, rollouts.pool),
                dataset=dataset,
                tokenizer=tokenizer,
                trackers=trackers,
                progress=progress,
            )

    async def _open(
        self, stack: AsyncExitStack, total_steps: int, on_wait: Callable[[str], None]
    ) -> tuple[Any, Any, Any | None, Any | None]:
        """(rollout service, policy, reference or None, critic or None), built at the same time, closed with the
        stack."""
        from skyrl.train.rollouts.service import RolloutService

        self._pin_cores()

        async def serve() -> Any:
            service = await RolloutService.open(self.cfg, self.get_model_folder(), on_wait=on_wait)
            stack.push_async_callback(service.close)
            on_wait("the policy")
            return service

        serving, training = asyncio.create_task(serve()), asyncio.create_task(self._open_models(stack, total_steps))
        try:
            rollouts, (policy, reference, critic) = await asyncio.gather(serving, training)
        except BaseException:
            serving.cancel()
            training.cancel()
            raise
        return rollouts, policy, reference, critic

    async def _open_models(self, stack: AsyncExitStack, total_steps: int) -> tuple[Any, Any | None, Any | None]:
        """(policy, reference or None, critic or None), one after the other."""
        from skyrl.train.policy.contract import Role
        from skyrl.train.policy.critic import CriticGroup
        from skyrl.train.policy.group import PolicyGroup
        from skyrl.train.policy.roles import roles_of
        from skyrl.train.policy.simulated import simulated

        trainer, roles = self.cfg.trainer, roles_of(self.cfg)

        def updates(mini_batch_size: int) -> int:
            return total_steps * -(-trainer.train_batch_size // mini_batch_size) * trainer.update_epochs_per_batch

        async def start(cls: type[PolicyGroup], role: Role, steps: int = 0) -> Any:
            group = await asyncio.to_thread(cls.create, self.cfg, self.plugin, role, total_steps=steps)
            stack.push_async_callback(_close, group)
            return group

        stack.push_async_callback(_leave_ray)  # entered first: the workers are closed before it
        policy = await start(PolicyGroup, "policy", updates(trainer.policy_mini_batch_size))
        reference = await start(PolicyGroup, "ref") if "ref" in roles else None
        critic = None
        if "critic" in roles:
            critic = await start(CriticGroup, "critic", updates(trainer.critic_mini_batch_size))
        return simulated(self.cfg, policy), reference, critic

    def _pin_cores(self) -> None:
        """Without GPUs, trainer and servers of this machine get cores of their own."""
        from skyrl.train.launch import cores
        from skyrl.train.launch.device import device_of
        from skyrl.train.policy.roles import any_in_process

        engine = self.cfg.generator.inference_engine
        if engine.external_server_urls or device_of(self.cfg) == "cuda":
            return
        plan = cores.plan(engine.num_servers)
        if plan is not None:
            log.info(cores.pin_trainer(plan, in_process=any_in_process(self.cfg)))


def told(error: BaseException | None) -> str | None:
    """What ended the run, with its traceback, as trackers get it; None after success."""
    return None if error is None else "".join(traceback.format_exception(error))


def in_front_of(own: type | None, backends: type) -> Any:
    """A class that does what a user's class changes, and else what the backend's does."""
    if own is None or issubclass(backends, own):
        return backends
    return own if issubclass(own, backends) else type(f"{own.__name__}On{backends.__name__}", (own, backends), {})


async def _close(group: Any) -> None:
    """Closes a policy group; a worker that hangs is left to the end of the process."""
    try:
        await asyncio.wait_for(asyncio.to_thread(group.close), CLOSE_TIMEOUT_S)
    except TimeoutError:
        log.warning("a policy worker did not close within %.0f s", CLOSE_TIMEOUT_S)


async def _leave_ray() -> None:
    """Ray ends with the run: its processes would not outlive the run's threads, and a second run of this process would
    find them gone."""
    if (ray_group := sys.modules.get("skyrl.train.policy.ray_group")) is None:  # no role has more than one worker
        return
    try:
        await asyncio.wait_for(asyncio.to_thread(ray_group.leave_ray), CLOSE_TIMEOUT_S)
    except TimeoutError:
        log.warning("Ray did not end within %.0f s", CLOSE_TIMEOUT_S)


def main(
    argv: Sequence[str] | None = None,
    *,
    exp_cls: type[BasePPOExp] = BasePPOExp,
    parts: Mapping[str, type] | None = None,
    before: Callable[[Sequence[str]], Sequence[str]] | None = None,
) -> None:
    """Runs the arguments (unset: the process's own). Returns after success; else the process ends with its code.

    `parts` are `make_config` arguments of the caller's own sections. `before` may change the arguments; what it raises
    is told like any other wrong configuration. `--check` among the arguments reports the run and starts nothing.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    folder: list[Path] = []

    def work() -> None:
        checks_only = CHECK in given
        wants_help, word, arguments = _help_wanted([argument for argument in given if argument != CHECK])
        arguments = list(before(arguments) if before else arguments)
        if wants_help:
            print(help_for(arguments, parts or {}, word=word))
            return
        if checks_only:
            print("\n".join(check_for(arguments, parts or {})))
            return
        cfg, plugin = backends.resolve(arguments, parts or {})
        folder.append(cfg.trainer.log_folder)
        _log_to_stderr(plugin)
        exp_cls(cfg, plugin).run()

    run_to_exit(work, log_folder=lambda: folder[0] if folder else None)


def check_for(arguments: Sequence[str], parts: Mapping[str, type]) -> list[str]:
    """The lines of `--check`: what these arguments would run. ConfigError where they would not."""
    from skyrl.train.display import check

    keys: list[str] = []
    cfg, plugin = backends.resolve(arguments, parts, announce=keys.append)
    return list(check.report(cfg, plugin, keys))


def help_for(arguments: Sequence[str], parts: Mapping[str, type], *, word: str = "") -> str:
    """The text of `--help [word]` for the backend that the arguments choose."""
    plugin = backends.load_plugin(backends.backend_name_from_argv(arguments))
    cls = make_config(**combine_parts(parts, plugin.config_parts))
    program = "python -m skyrl.train.entrypoints.main_base"
    return render(cls, program=program, backends=", ".join(backends.installed()), word=word)


def _help_wanted(arguments: Sequence[str]) -> tuple[bool, str, list[str]]:
    """(whether --help is among them, its word, the other arguments)."""
    others = [a for a in arguments if a not in ("--help", "-h")]
    if len(others) == len(arguments):
        return False, "", others
    words = [a for a in others if "=" not in a and not a.startswith(("@", "-"))]
    return True, words[0] if words else "", [a for a in others if a not in words]


def _log_to_stderr(plugin: BackendPlugin) -> None:
    """What this project and the backend say from level INFO on, everybody else from WARNING on."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    for name in {"skyrl", "skyrl_rollout", plugin.trainer_cls.partition(".")[0]}:
        logging.getLogger(name).setLevel(logging.INFO)


if __name__ == "__main__":
    main()
