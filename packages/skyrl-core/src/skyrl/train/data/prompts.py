"""Which prompts a run trains or evaluates on, read from parquet, json or jsonl files; a file or row that does not fit
is refused by name. Hub names are not resolved: data is local."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from skyrl.train import environments
from skyrl.train.generator.chat import ChatFormat, Tokenizer
from skyrl.train.generator.trajectory import PromptTask

log = logging.getLogger(__name__)

PROMPT_COLUMN = "prompt"
ENV_COLUMN = "env_class"


class PromptDataset:
    """The usable rows of one or more files, in file order, as `PromptTask`s.

    A row's `prompt` holds OpenAI-style messages; `env_class` falls back to `default_env_class`; every other column
    goes to the environment as extras. `uid` is the row's index over all files, so it names the row also where others
    were left out. Rows whose prompt is longer than `max_prompt_length` tokens are left out, counted in `num_dropped`.

    Raises ValueError naming the file, and the row or column, for whatever cannot be read.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        chat: ChatFormat,
        *,
        max_prompt_length: int,
        default_env_class: str | None = None,
        key: str = "data.train_data",
    ) -> None:
        self.key = key
        self.max_prompt_length = max_prompt_length
        self.num_dropped = 0
        self._tasks: list[PromptTask] = []
        if not files:
            raise ValueError(f"{key} names no file: give at least one .parquet, .json or .jsonl file")
        digest = xxhash.xxh3_128()
        first = 0
        for path in (Path(file).expanduser() for file in files):
            rows = read_rows(path, key=key)
            for index, row in enumerate(rows):
                where = f"{path}, row {index}"
                task = _task(row, uid=str(first + index), where=where, default_env=default_env_class)
                if _num_tokens(task, chat, where) > max_prompt_length:
                    self.num_dropped += 1
                    continue
                self._tasks.append(task)
                digest.update(
                    json.dumps([task.uid, task.env_class, task.messages, task.env_extras], default=str).encode()
                )
            first += len(rows)
        self.digest = digest.hexdigest()
        if not self._tasks:
            raise ValueError(
                f"{key}: all {first} prompts are longer than trainer.max_prompt_length={max_prompt_length} tokens, "
                "so none is left: raise that limit"
            )

    @staticmethod
    def from_config(cfg: Any, tokenizer: Tokenizer, split: Literal["train", "val"]) -> PromptDataset:
        """`data.train_data` or `data.val_data`, with every environment that they name known before any rollout."""
        dataset = PromptDataset(
            getattr(cfg.data, f"{split}_data"),
            ChatFormat.from_config(cfg.generator, tokenizer),
            max_prompt_length=cfg.trainer.max_prompt_length,
            default_env_class=cfg.environment.env_class,
            key=f"data.{split}_data",
        )
        if dataset.num_dropped:
            log.warning(
                "%s: %d of %d prompts have more than trainer.max_prompt_length=%d tokens and are left out",
                dataset.key,
                dataset.num_dropped,
                dataset.num_dropped + len(dataset),
                dataset.max_prompt_length,
            )
        environments.import_plugins(cfg.environment.plugins)
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


def read_rows(path: Path, *, key: str) -> list[dict[str, Any]]:
    """All rows of one file. Raises ValueError naming the file."""
    readers = {".parquet": _read_parquet, ".json": _read_json, ".jsonl": _read_json_lines}
    if path.suffix not in readers:
        raise ValueError(f"{key}: {path} is not a .parquet, .json or .jsonl file")
    if not path.is_file():
        raise ValueError(f"{key}: no such file: {path}")
    rows = readers[path.suffix](path, key)
    if not rows:
        raise ValueError(f"{key}: {path} holds no rows")
    return rows


def _read_parquet(path: Path, key: str) -> list[dict[str, Any]]:
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{key}: {path} ({path.stat().st_size} bytes) is not a readable parquet file: {reason}"
        ) from error
    if PROMPT_COLUMN not in table.column_names:
        raise ValueError(f"{key}: {path} has no column {PROMPT_COLUMN!r}; it has {', '.join(table.column_names)}")
    return table.to_pylist()


def _read_json(path: Path, key: str) -> list[dict[str, Any]]:
    """A JSON array of objects, or one object a line under the name .json."""
    try:
        rows = json.loads(path.read_text())
    except json.JSONDecodeError:
        return _read_json_lines(path, key)
    except UnicodeDecodeError as error:
        raise ValueError(f"{key}: {path} is not UTF-8 text: {error}") from error
    if isinstance(rows, list):
        return rows
    if isinstance(rows, dict):
        return [rows]
    raise ValueError(f"{key}: {path}: expected a list of objects, got {rows!r:.80}")


def _read_json_lines(path: Path, key: str) -> list[dict[str, Any]]:
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{key}: {path} is not UTF-8 text: {error}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except json.JSONDecodeError as error:
            raise ValueError(f"{key}: {path}, line {number} is not JSON: {error}") from error
    return rows


def _num_tokens(task: PromptTask, chat: ChatFormat, where: str) -> int:
    try:
        num_tokens = len(chat.prompt_ids(task.messages))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if num_tokens == 0:
        raise ValueError(f"{where}: the prompt {task.messages!r:.80} is no token at all: give it content")
    return num_tokens


def _task(row: Any, *, uid: str, where: str, default_env: str | None) -> PromptTask:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object with column {PROMPT_COLUMN!r}, got {type(row).__name__}")
    if PROMPT_COLUMN not in row:
        raise ValueError(f"{where}: no column {PROMPT_COLUMN!r}; the row has {', '.join(row) or 'nothing'}")
    env_class = row.get(ENV_COLUMN) or default_env
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
