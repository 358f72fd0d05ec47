"""Keys outside of `trainer.algorithm` and the value that changes what is made of them at the nearest place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import skyrl.train.quickstart
from skyrl.train import environments
from skyrl.train.entrypoints import run_folders
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.generator.chat import ChatFormat
from skyrl.train.generator.sampling import to_sampling
from skyrl.train.launch import command, gpus, table
from skyrl.train.policy import roles
from skyrl.train.policy.worker import forward_limits, train_limits
from skyrl.train.trainer import training_steps

QUICKSTART = Path(skyrl.train.quickstart.__file__).parent
VALUES = {"model": "/m", "listen": "127.0.0.1:1", "dtype": "float32", "seed": "42"}
SEARCH = {"reward_spec": {"ground_truth": {"target": ["x"]}}, "max_turns": 2}
TEMPLATE = "{% if enable_thinking %}think{% endif %}{{ messages[0]['content'] }}"


@dataclass(frozen=True)
class Effect:
    """`value` of the key changes what `made(cfg)` is, beside `others`."""

    made: Callable[[Any], Any]
    value: str
    others: tuple[str, ...] = ()


def limits(cfg: Any) -> Any:
    """What one pass of a worker takes, with and without a backward pass."""
    return train_limits(cfg), forward_limits(cfg)


def steps(cfg: Any) -> int:
    return training_steps(cfg, 10)


def started(cfg: Any) -> Any:
    """The command of a server on GPUs, how many there are, and the GPUs of the first."""
    engine = cfg.generator.inference_engine
    built = command.build(table.find(engine), engine, VALUES, device="cuda", binaries=None)
    return built, engine.num_servers, gpus.server_gpus(cfg, 0)


def asked(cfg: Any) -> Any:
    """The sampling parameters of a request, in training and in evaluation."""
    generator = cfg.generator
    return to_sampling(generator.sampling_params, key="a"), to_sampling(generator.eval_sampling_params, key="b")


def folders(cfg: Any) -> Any:
    return run_folders.used(cfg), cfg.trainer.log_folder, cfg.trainer.run_folder


def workers(cfg: Any) -> Any:
    return [roles.num_workers(cfg, role) for role in ("policy", "critic", "ref")]


def searching(cfg: Any) -> Any:
    """What the search environment asks, where and how often."""
    config = cfg.environment.skyrl_gym.search
    tools = environments.make("search", env_config=config, extras=SEARCH).tool_group
    return {name: value for name, value in vars(tools).items() if isinstance(value, str | int | bool)}


def database(cfg: Any) -> str:
    """Where the database of a row is looked for: it is not there, and the error says where."""
    extras = {"db_id": "d", "data": "bird", **SEARCH}
    try:
        environments.make("text2sql", env_config=cfg.environment.skyrl_gym.text2sql, extras=extras)
    except FileNotFoundError as error:
        return str(error)
    raise AssertionError("a database of that name exists")


def prompt(cfg: Any) -> Any:
    """The tokens of a prompt under a template that has a switch."""
    tokenizer = BasePPOExp(cfg).get_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return ChatFormat.from_config(cfg.generator, tokenizer).prompt_ids([{"role": "user", "content": "1+1="}]).tolist()


ENGINE, PLACE, SAMPLING = "generator.inference_engine.", "trainer.placement.", "generator.sampling_params."
EVALUATION, GYM = "generator.eval_sampling_params.", "environment.skyrl_gym."
TINY = (f"trainer.policy.model.path={QUICKSTART / 'tiny_model'}",)
CRITIC = ("trainer.critic.model.path=a/b", "trainer.algorithm.advantage_estimator=gae", f"{PLACE}colocate_all=false")

EFFECTS: dict[str, Effect] = {
    "trainer.epochs": Effect(steps, "3"),
    "trainer.max_training_steps": Effect(steps, "4"),
    "trainer.micro_train_batch_size_per_gpu": Effect(limits, "3"),
    "trainer.micro_forward_batch_size_per_gpu": Effect(limits, "3"),
    "trainer.max_tokens_per_microbatch": Effect(limits, "100"),
    f"{PLACE}policy_num_nodes": Effect(workers, "2"),
    f"{PLACE}policy_num_gpus_per_node": Effect(workers, "2"),
    f"{PLACE}critic_num_nodes": Effect(workers, "2", CRITIC),
    f"{PLACE}critic_num_gpus_per_node": Effect(workers, "2", CRITIC),
    f"{PLACE}ref_num_nodes": Effect(workers, "2", (f"{PLACE}colocate_all=false", f"{PLACE}colocate_policy_ref=false")),
    f"{PLACE}ref_num_gpus_per_node": Effect(
        workers, "2", (f"{PLACE}colocate_all=false", f"{PLACE}colocate_policy_ref=false")
    ),
    f"{PLACE}colocate_all": Effect(started, "false"),
    f"{PLACE}colocate_policy_ref": Effect(
        workers, "false", (f"{PLACE}colocate_all=false", f"{PLACE}policy_num_gpus_per_node=2")
    ),
    f"{ENGINE}backend": Effect(started, "transformers"),
    f"{ENGINE}num_engines": Effect(started, "2"),
    f"{ENGINE}data_parallel_size": Effect(started, "2"),
    f"{ENGINE}tensor_parallel_size": Effect(started, "2"),
    f"{ENGINE}expert_parallel_size": Effect(started, "2", (f"{ENGINE}tensor_parallel_size=2",)),
    f"{ENGINE}gpu_memory_utilization": Effect(started, "0.5"),
    f"{ENGINE}enforce_eager": Effect(started, "true"),
    f"{ENGINE}weight_sync_backend": Effect(started, "delta"),
    f"{ENGINE}max_num_seqs": Effect(started, "7"),
    f"{ENGINE}max_num_batched_tokens": Effect(started, "77"),
    f"{ENGINE}enable_prefix_caching": Effect(started, "false"),
    f"{ENGINE}speculative_config": Effect(started, "{model: d}"),
    f"{ENGINE}engine_init_kwargs": Effect(started, "{max_model_len: 9}"),
    f"{SAMPLING}max_generate_length": Effect(asked, "7"),
    f"{SAMPLING}temperature": Effect(asked, "0.5"),
    f"{SAMPLING}top_p": Effect(asked, "0.5"),
    f"{SAMPLING}top_k": Effect(asked, "5"),
    f"{SAMPLING}min_p": Effect(asked, "0.5"),
    f"{SAMPLING}repetition_penalty": Effect(asked, "1.5"),
    f"{SAMPLING}stop": Effect(asked, "[x]"),
    f"{SAMPLING}additional_kwargs": Effect(asked, "{min_tokens: 2}"),
    f"{EVALUATION}max_generate_length": Effect(asked, "7"),
    f"{EVALUATION}temperature": Effect(asked, "0.5"),
    f"{EVALUATION}top_p": Effect(asked, "0.5"),
    f"{EVALUATION}top_k": Effect(asked, "5"),
    f"{EVALUATION}stop": Effect(asked, "[x]"),
    "trainer.ckpt_path": Effect(folders, "/x"),
    "trainer.export_path": Effect(folders, "/x"),
    "trainer.log_path": Effect(folders, "/x"),
    "trainer.project_name": Effect(folders, "other"),
    "trainer.run_name": Effect(folders, "other"),
    f"{GYM}search.search_url": Effect(searching, "http://h:1/r"),
    f"{GYM}search.topk": Effect(searching, "9"),
    f"{GYM}search.log_requests": Effect(searching, "true"),
    f"{GYM}search.timeout": Effect(searching, "9"),
    f"{GYM}text2sql.db_path": Effect(database, "/elsewhere"),
    "generator.chat_template_kwargs": Effect(prompt, "{enable_thinking: true}", TINY),
}
