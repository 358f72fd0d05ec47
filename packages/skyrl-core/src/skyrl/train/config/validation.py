"""Rules between keys: which numbers must divide which, which switches exclude each other, which names are known."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from skyrl.train import plugins
from skyrl.train.algorithms.critic import uses_critic
from skyrl.train.config import absent, algorithm_rules, lora_rules, mode_rules, schedules, sharding_rules
from skyrl.train.config.problems import ConfigError, listed
from skyrl.train.config.root import SkyRLTrainConfig
from skyrl.train.generator.sampling import to_sampling
from skyrl.train.launch import table
from skyrl.train.rollouts.members import read_urls, url_file
from skyrl.train.trackers import TRACKERS

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+$")
URL_SCHEMES = ("grpc://", "grpcs://", "unix://")


def validate(cfg: SkyRLTrainConfig) -> None:
    """ConfigError lists every rule that the configuration breaks."""
    problems = [problem for rule in RULES for problem in rule(cfg)]
    if problems:
        raise ConfigError(problems)


def own_modules(cfg: Any) -> Iterator[str]:
    """The user's own modules: imported first, because they register names that later rules look up."""
    try:
        plugins.import_plugins(cfg.environment.plugins)
        if cfg.environment.reward:
            plugins.reward_function(cfg.environment.reward)
    except ValueError as error:
        yield str(error)
    if cfg.environment.reward and cfg.generator.max_turns > 1:
        yield (
            f"environment.reward scores one turn, and generator.max_turns={cfg.generator.max_turns}: leave "
            f"max_turns out, or register an environment of your own with environment.plugins"
        )


def batch_sizes(cfg: Any) -> Iterator[str]:
    """Whole mini-batches in a batch, and work for every worker in each mini-batch."""
    for role in ("policy", "critic") if uses_critic(cfg.trainer) else ("policy",):
        yield from _mini_batches(cfg, role)


def _mini_batches(cfg: Any, role: str) -> Iterator[str]:
    trainer, samples = cfg.trainer, cfg.generator.n_samples_per_prompt
    train, mini = trainer.train_batch_size, getattr(trainer, f"{role}_mini_batch_size")
    if mini > train:
        yield (
            f"trainer.{role}_mini_batch_size={mini}: more prompts than trainer.train_batch_size={train}; "
            f"a mini-batch is a part of the batch: set it to {train} or to a divisor of it"
        )
    elif train % mini:
        below = max(d for d in range(1, mini) if train % d == 0)
        yield (
            f"trainer.train_batch_size={train} must be a multiple of trainer.{role}_mini_batch_size={mini}: "
            f"set the mini-batch to {below}, or the batch to {train // mini * mini} or {(train // mini + 1) * mini}"
        )
    nodes, per_node = (getattr(trainer.placement, f"{role}_num_{of}") for of in ("nodes", "gpus_per_node"))
    workers = nodes * per_node
    if mini * samples < workers:
        yield (
            f"trainer.{role}_mini_batch_size={mini} x generator.n_samples_per_prompt={samples} = {mini * samples} "
            f"samples must give each of the {workers} {role} workers (trainer.placement.{role}_num_nodes x "
            f"{role}_num_gpus_per_node) at least one: raise the mini-batch to {math.ceil(workers / samples)}"
        )


def lengths(cfg: Any) -> Iterator[str]:
    """How long prompts and contexts may be."""
    generator, prompt = cfg.generator, cfg.trainer.max_prompt_length
    if generator.max_turns == 1 and generator.max_input_length != prompt:
        yield (
            f"generator.max_input_length={generator.max_input_length} must equal trainer.max_prompt_length={prompt} "
            f"where generator.max_turns=1: leave it out"
        )
    elif generator.max_input_length < prompt:
        yield (
            f"generator.max_input_length={generator.max_input_length} must be at least "
            f"trainer.max_prompt_length={prompt}: a longer prompt could not start"
        )


def sampling(cfg: Any) -> Iterator[str]:
    """Logprobs that a server returns, and a temperature that can be trained on."""
    for name in ("sampling_params", "eval_sampling_params"):
        params = getattr(cfg.generator, name)
        if params.logprobs not in (None, 0, 1):
            yield f"generator.{name}.logprobs={params.logprobs}: expected null, 0 or 1 (the sampled token's)"
        try:
            to_sampling(params, key=f"generator.{name}")
        except ValueError as error:
            yield str(error)
    drawn = cfg.generator.sampling_params
    whole = drawn.top_p == 1 and drawn.top_k <= 0 and drawn.min_p == 0 and drawn.repetition_penalty == 1
    if cfg.trainer.algorithm.old_logprobs == "rollout" and not (whole and not drawn.additional_kwargs):
        yield (
            "trainer.algorithm.old_logprobs=rollout: with top_p, top_k, min_p or penalties a server's logprobs are not "
            "those that the trainer computes: set it to recompute, or leave these sampling parameters out"
        )
    temperature = cfg.trainer.algorithm.temperature
    if temperature <= 0 and cfg.trainer.mode != "generate":
        yield (
            f"trainer.algorithm.temperature={temperature}: expected more than 0; greedy samples of a prompt are all "
            f"equal and carry no advantage: set generator.sampling_params.temperature above 0"
        )


def trackers(cfg: Any) -> Iterator[str]:
    """Names of trackers, and what they need."""
    for name in cfg.trainer.logger:
        if name not in TRACKERS:
            yield f"trainer.logger={name}: {listed(name, TRACKERS)}"
    offline = os.environ.get("WANDB_MODE", "") in ("offline", "disabled")
    if "wandb" in cfg.trainer.logger and not os.environ.get("WANDB_API_KEY") and not offline:
        yield (
            "trainer.logger=wandb: the environment variable WANDB_API_KEY is not set; set it, set "
            "WANDB_MODE=offline, or choose trainer.logger=['console','tensorboard']"
        )


def placement(cfg: Any) -> Iterator[str]:
    """Workers of policy, critic and reference."""
    trainer = cfg.trainer
    place = trainer.placement
    policy = (place.policy_num_nodes, place.policy_num_gpus_per_node)
    ref = (place.ref_num_nodes, place.ref_num_gpus_per_node)
    shared = place.colocate_all or place.colocate_policy_ref
    told = {"ref_num_nodes", "ref_num_gpus_per_node"} & place.model_fields_set
    if trainer.algorithm.needs_reference and shared and policy != ref and told:
        yield (
            f"trainer.placement.ref_num_nodes x ref_num_gpus_per_node = {ref[0]} x {ref[1]} must equal the policy's "
            f"{policy[0]} x {policy[1]} where they share devices (trainer.placement.colocate_policy_ref)"
        )
    critic = (place.critic_num_nodes, place.critic_num_gpus_per_node)
    told = {"critic_num_nodes", "critic_num_gpus_per_node"} & place.model_fields_set
    if uses_critic(trainer) and place.colocate_all and policy != critic and told:
        yield (
            f"trainer.placement.critic_num_nodes x critic_num_gpus_per_node = {critic[0]} x {critic[1]} must equal the "
            f"policy's {policy[0]} x {policy[1]} where all share devices (trainer.placement.colocate_all)"
        )


def servers(cfg: Any) -> Iterator[str]:
    """Either started or connected to, under an address of the right form."""
    engine, place = cfg.generator.inference_engine, cfg.trainer.placement
    yield from _server_urls(engine.external_server_urls)
    if engine.external_server_urls is not None and not engine.external_server_urls:
        yield "generator.inference_engine.external_server_urls=[]: expected at least one url, or leave it out"
    if engine.external_server_urls and engine.run_engines_locally:
        yield (
            "generator.inference_engine.run_engines_locally=true contradicts external_server_urls: "
            "leave it out, or leave the urls out"
        )
    if engine.external_server_urls and place.colocate_all:
        yield (
            "trainer.placement.colocate_all=true contradicts generator.inference_engine.external_server_urls: "
            "external servers own their devices; leave it out"
        )
    if not engine.run_engines_locally and not engine.external_server_urls:
        yield (
            "generator.inference_engine.run_engines_locally=false needs the servers to connect to: "
            "generator.inference_engine.external_server_urls=['grpc://host:50051']"
        )


def server_settings(cfg: Any) -> Iterator[str]:
    """A server that can be started, and names of ways that exist."""
    engine = cfg.generator.inference_engine
    if not engine.external_server_urls:
        try:
            table.find(engine)
        except ValueError as error:
            yield str(error)
    known = ("auto", "nccl", "shm", "inline", "delta")
    if engine.weight_sync_backend not in known:
        yield (
            f"generator.inference_engine.weight_sync_backend={engine.weight_sync_backend}: "
            f"{listed(engine.weight_sync_backend, known)}"
        )
    if engine.distributed_executor_backend not in ("mp", "ray"):
        yield (
            f"generator.inference_engine.distributed_executor_backend={engine.distributed_executor_backend}: "
            f"expected mp or ray"
        )


def server_sizes(cfg: Any) -> Iterator[str]:
    """GPUs of a server, and which part of a model both sides take."""
    engine, policy = cfg.generator.inference_engine, cfg.trainer.policy
    experts, width = engine.expert_parallel_size, engine.tensor_parallel_size
    if experts > 1 and experts != width:
        yield (
            f"generator.inference_engine.expert_parallel_size={experts}: a server shares its experts over all of its "
            f"GPUs: expected 1, or generator.inference_engine.tensor_parallel_size={width}"
        )
    if policy.language_model_only != engine.language_model_only:
        yield (
            f"trainer.policy.language_model_only={str(policy.language_model_only).lower()} and "
            f"generator.inference_engine.language_model_only={str(engine.language_model_only).lower()}: trainer and "
            f"servers must hold the same part of the model: set both"
        )
    if engine.num_prefill and not engine.enable_pd:
        yield (
            f"generator.inference_engine.num_prefill={engine.num_prefill} is read with enable_pd=true only: "
            f"leave it out"
        )


def _server_urls(urls: Sequence[str] | None) -> Iterator[str]:
    """Addresses, or one file that names them."""
    try:
        if (path := url_file(urls)) is not None:
            read_urls(path)
            return
    except (OSError, ValueError) as error:
        yield f"generator.inference_engine.external_server_urls: {error}"
        return
    for url in urls or ():
        yield from _server_url(url)


def _server_url(url: str) -> Iterator[str]:
    key = "generator.inference_engine.external_server_urls"
    if url.startswith(("http://", "https://")):
        scheme, rest = url.split("://", 1)
        form = f"{'grpcs' if scheme == 'https' else 'grpc'}://{rest.rstrip('/')}"
        yield f"{key}: {url} is an HTTP address, and rollout servers speak gRPC: write {form} (the server's gRPC port)"
    elif not url.startswith(URL_SCHEMES):
        yield (
            f"{key}: {url!r} is not an address; write grpc://host:port, grpcs://host:port or unix:///path, "
            "or file:///path of a file with one such address a line"
        )


def checkpoints(cfg: Any) -> Iterator[str]:
    """Where to resume from, and how many checkpoints stay."""
    trainer = cfg.trainer
    if trainer.max_ckpts_to_keep == 0:
        yield "trainer.max_ckpts_to_keep=0: expected -1 (keep all) or at least 1"
    if trainer.resume_mode == "from_path":
        folder = Path(trainer.resume_path or "").expanduser()
        if trainer.resume_path is None:
            yield "trainer.resume_mode=from_path needs trainer.resume_path=FOLDER/global_step_N"
        elif "global_step_" not in folder.name:
            yield f"trainer.resume_path={folder}: expected a folder named global_step_N"
        elif not folder.is_dir():
            yield f"trainer.resume_path={folder}: no such folder"
    elif trainer.resume_path is not None:
        yield (
            f"trainer.resume_path is only read with trainer.resume_mode=from_path (it is {trainer.resume_mode}): "
            f"set that, or leave the path out"
        )


def folders(cfg: Any) -> Iterator[str]:
    """What a run writes goes to folders of this machine."""
    for name in ("ckpt_path", "export_path", "log_path"):
        path = getattr(cfg.trainer, name)
        if "://" in path:
            yield f"trainer.{name}={path}: expected a folder on this machine; mount the store, or copy the files later"


def model_paths(cfg: Any) -> Iterator[str]:
    """A folder must exist; anything of the form owner/name is asked for at the hub later."""
    paths = {"trainer.policy.model.path": cfg.trainer.policy.model.path}
    if cfg.trainer.algorithm.needs_reference:
        paths["trainer.ref.model.path"] = cfg.trainer.ref.model.path
    if uses_critic(cfg.trainer):
        paths["trainer.critic.model.path"] = cfg.trainer.critic.model.path
    told = set()
    for key, path in paths.items():
        folder = Path(path).expanduser()
        if path in told or folder.is_dir() and (folder / "config.json").is_file():
            continue
        told.add(path)
        if folder.is_dir():
            yield f"{key}={path}: the folder has no config.json, so it is no Hugging Face checkpoint"
        elif not HUB_NAME.match(path):
            yield f"{key}={path}: no such folder; give a Hugging Face checkpoint's folder, or owner/name on the hub"


RULES: tuple[Callable[[Any], Iterator[str]], ...] = (
    own_modules, absent.rules, model_paths, batch_sizes, lengths, sampling, trackers, *algorithm_rules.RULES,
    *mode_rules.RULES, *lora_rules.RULES, *sharding_rules.RULES, placement, schedules.rules, servers, server_settings,
    server_sizes, checkpoints, folders,
)  # fmt: skip
