"""Which prompts a run trains or evaluates on: the rows of its files; one that does not fit is refused by name."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import xxhash

from skyrl.train import environments, plugins
from skyrl.train.data.files import read_rows
from skyrl.train.data.sources import files_of
from skyrl.train.generator.chat import ChatFormat, Tokenizer
from skyrl.train.generator.trajectory import PromptTask

log = logging.getLogger(__name__)

PROMPT_COLUMN = "prompt"
ENV_COLUMN = "env_class"
NAMED = 3  # rows that are left out and named in the log


class PromptDataset:
    """The usable rows of one or more sources, in order, as `PromptTask`s; a source is what `sources.files_of` takes.

    A row's `prompt` holds OpenAI-style messages; `env_class` falls back to `default_env_class`, and the argument
    `env_class` stands for that of every row; every other column goes to the environment as extras. `uid` is the row's
    index over all files, so it names the row also where others were left out. Rows whose prompt is longer than
    `max_prompt_length` tokens are left out, counted in `num_dropped`; `dropped` names the first of them.

    Raises ValueError naming the file, and the row or column, for whatever cannot be read.
    """

    def __init__(
        self,
        sources: Sequence[str | Path],
        chat: ChatFormat,
        *,
        max_prompt_length: int,
        default_env_class: str | None = None,
        env_class: str | None = None,
        key: str = "data.train_data",
    ) -> None:
        self.key = key
        self.max_prompt_length = max_prompt_length
        self.num_dropped = 0
        self.dropped: list[str] = []
        self._tasks: list[PromptTask] = []
        if not sources:
            raise ValueError(f"{key} names no file: give at least one .parquet, .json or .jsonl file")
        digest = xxhash.xxh3_128()
        uid = -1
        for path in (file for source in sources for file in files_of(source, key=key)):
            rows = read_rows(path, key=key)
            if path.suffix == ".parquet" and PROMPT_COLUMN not in rows[0]:
                raise ValueError(f"{key}: {path} has no column {PROMPT_COLUMN!r}; it has {', '.join(rows[0])}")
            for index, row in enumerate(rows):
                uid += 1
                where = f"{path}, row {index}"
                task = _task(row, uid=str(uid), where=where, env_class=env_class, default_env=default_env_class)
                if (num_tokens := _num_tokens(task, chat, where)) > max_prompt_length:
                    self._leave_out(f"{where} ({num_tokens} tokens)")
                    continue
                self._tasks.append(task)
                digest.update(
                    json.dumps([task.uid, task.env_class, task.messages, task.env_extras], default=str).encode()
                )
        self.digest = digest.hexdigest()
        if not self._tasks:
            raise ValueError(
                f"{key}: all {uid + 1} prompts are longer than trainer.max_prompt_length={max_prompt_length} tokens, "
                "so none is left: raise that limit"
            )

    def _leave_out(self, name: str) -> None:
        self.num_dropped += 1
        if len(self.dropped) < NAMED:
            self.dropped.append(name)

    @staticmethod
    def from_config(cfg: Any, tokenizer: Tokenizer, split: Literal["train", "val"]) -> PromptDataset:
        """`data.train_data` or `data.val_data`, with every environment that they name known before any rollout.

        With `environment.reward` that function scores every row, whatever environment it names.
        """
        plugins.import_plugins(cfg.environment.plugins)
        reward = environments.use_reward(cfg.environment.reward) if cfg.environment.reward else None
        dataset = PromptDataset(
            getattr(cfg.data, f"{split}_data"),
            ChatFormat.from_config(cfg.generator, tokenizer),
            max_prompt_length=cfg.trainer.max_prompt_length,
            default_env_class=cfg.environment.env_class,
            env_class=reward,
            key=f"data.{split}_data",
        )
        if dataset.num_dropped:
            log.warning(
                "%s: %d of %d prompts have more than trainer.max_prompt_length=%d tokens and are left out: %s%s",
                dataset.key,
                dataset.num_dropped,
                dataset.num_dropped + len(dataset),
                dataset.max_prompt_length,
                ", ".join(dataset.dropped),
                ", ..." if dataset.num_dropped > len(dataset.dropped) else "",
            )
        environments.require(dataset.env_classes)
        return dataset

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> PromptTask:
        return self._tasks[index]

    def __iter__(self) -> Iterator[PromptTask]:
        return iter(self._tasks)

    def tasks(self) -> list[PromptTask]:
        """All prompts, in file order."""
        return list(self._tasks)

    @property
    def env_classes(self) -> frozenset[str]:
        """Every environment that some row needs."""
        return frozenset(task.env_class for task in self._tasks)


def _num_tokens(task: PromptTask, chat: ChatFormat, where: str) -> int:
    try:
        num_tokens = len(chat.prompt_ids(task.messages))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if num_tokens == 0:
        raise ValueError(f"{where}: the prompt {task.messages!r:.80} is no token at all: give it content")
    return num_tokens


def _task(row: Any, *, uid: str, where: str, env_class: str | None, default_env: str | None) -> PromptTask:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object with column {PROMPT_COLUMN!r}, got {type(row).__name__}")
    if PROMPT_COLUMN not in row:
        raise ValueError(f"{where}: no column {PROMPT_COLUMN!r}; the row has {', '.join(row) or 'nothing'}")
    env_class = env_class or row.get(ENV_COLUMN) or default_env
    if not env_class:
        raise ValueError(f"{where}: no {ENV_COLUMN!r}, and environment.env_class is not set: name an environment")
    extras = {name: value for name, value in row.items() if name not in (PROMPT_COLUMN, ENV_COLUMN)}
    return PromptTask(uid, _messages(row[PROMPT_COLUMN], where), str(env_class), extras)


def _messages(prompt: Any, where: str) -> list[dict[str, str]]:
    """The prompt as it goes into the chat template; fields that parquet filled with null are left out."""
    form = "a list of messages such as [{'role': 'user', 'content': '...'}]"
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"{where}, column {PROMPT_COLUMN!r}: expected {form}, got {prompt!r:.80}")
    for message in prompt:
        fits = isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content"))
        if not fits:
            raise ValueError(f"{where}, column {PROMPT_COLUMN!r}: expected {form}, got the message {message!r:.80}")
    return [{name: value for name, value in message.items() if value is not None} for message in prompt]
