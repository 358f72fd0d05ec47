"""Which files an entry of `data.train_data` means: a file, a folder with its split, or a data set of the hub.

    rows.parquet                     a .parquet, .json or .jsonl file
    ~/data/my_set:validation         a folder laid out like a data set on the hub; the split is `train` unless named
    owner/name:validation            a data set of the Hugging Face hub, from the cache or downloaded
    owner/name:config/validation     the same, of one of its configurations

A split's files are those that the `configs` of README.md list, else those whose path has the split's name in it.
Scripts that a data set brings along are not run.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from skyrl.train.config.problems import listed
from skyrl.train.data.files import READERS

CARD = "README.md"
WANTED = [CARD, *(f"*{suffix}" for suffix in READERS)]
PART = re.compile(r"-\d+-of-(\d+)(?=\.)")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+$")
DEFAULT_SPLIT = "train"
HUB_TIMEOUT_S = 10
R = TypeVar("R")


class Split(NamedTuple):
    """What stands after the colon of `name:config/split`."""

    config: str | None = None
    name: str = DEFAULT_SPLIT


def files_of(source: str | Path, *, key: str) -> list[Path]:
    """The files of one entry, in order. Raises ValueError naming `key` for a split, folder or data set that is not
    there; whether a plain file exists is for whoever reads it."""
    text = str(source)
    path = Path(text).expanduser()
    if path.is_file() or path.suffix in READERS:
        return [path]
    name, _, rest = text.partition(":")
    *config, split = rest.split("/", 1) if rest else [DEFAULT_SPLIT]
    wanted = Split(config[0] if config else None, split)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _in_folder(folder, wanted, where=f"{key}: folder {folder}")
    if HUB_NAME.match(name):
        return _from_hub(name, wanted, key=key)
    return [path]


def _from_hub(name: str, wanted: Split, *, key: str) -> list[Path]:
    """From the cache if its snapshot is whole, else downloaded: the card and this split's files only."""
    where = f"{key}: data set {name}"
    try:
        cached = snapshot_download(name, repo_type="dataset", allow_patterns=WANTED, local_files_only=True)
        return _in_folder(Path(cached), wanted, where=where)
    except (LocalEntryNotFoundError, ValueError, OSError):
        pass  # not cached, or not this split or all of it: ask the hub
    names = _asked(lambda: _names_at_the_hub(name), name, key)
    card = _asked(lambda: _download(name, [CARD]), name, key)
    chosen = choose(names, _card(card), wanted, where=where)
    folder = _asked(lambda: _download(name, [CARD, *chosen]), name, key)
    return [folder / one for one in chosen]


def _names_at_the_hub(name: str) -> list[str]:
    info = HfApi().dataset_info(name, timeout=HUB_TIMEOUT_S)  # list_repo_files takes no deadline
    return [file.rfilename for file in info.siblings or []]


def _download(name: str, patterns: list[str]) -> Path:
    return Path(snapshot_download(name, repo_type="dataset", allow_patterns=patterns, etag_timeout=HUB_TIMEOUT_S))


def _asked(question: Callable[[], R], name: str, key: str) -> R:
    """What the hub answers. Raises ValueError where it does not."""
    try:
        return question()
    except Exception as error:  # also those of the HTTP library, which are neither its own nor OSError
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{key}={name}: no such file or folder here, and the hub did not give a data set of that name ({reason}); "
            f"give a .parquet, .json or .jsonl file"
        ) from error


def _in_folder(folder: Path, wanted: Split, *, where: str) -> list[Path]:
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return [folder / name for name in choose(names, _card(folder), wanted, where=where)]


def choose(names: Iterable[str], card: dict[str, Any], wanted: Split, *, where: str) -> list[str]:
    """Which of the files `names` hold the split, sorted. Raises ValueError listing what there is."""
    names = sorted(name for name in names if Path(name).suffix in READERS)
    configs = {c["config_name"]: c for c in card.get("configs") or [] if c.get("data_files")}
    if configs:
        patterns = _patterns(configs, wanted, where)
        found = [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    else:
        inside = [name for name in names if wanted.config is None or wanted.config in Path(name).parts]
        found = [name for name in inside if re.search(rf"(^|[/._-]){re.escape(wanted.name)}([/._-])", name)]
    if not found:
        raise ValueError(f"{where} has no file of the split {wanted.name!r}; it has {_shown(names)}")
    _require_whole(found, f"{where}, split {wanted.name!r}")
    return found


def _require_whole(names: Sequence[str], where: str) -> None:
    """Raises ValueError where files are numbered `-00001-of-00003` and some are missing, as after a broken download."""
    parts = Counter((PART.sub("", name), int(found.group(1))) for name in names if (found := PART.search(name)))
    for (name, total), count in parts.items():
        if count < total:
            raise ValueError(f"{where} has {count} of the {total} files of {name}: copy the others too")


def _patterns(configs: dict[str, Any], wanted: Split, where: str) -> list[str]:
    """Of the files that the card lists under a configuration and a split."""
    name = wanted.config or _default_config(configs, where)
    if name not in configs:
        raise ValueError(f"{where} has no configuration {name!r}: {listed(name, configs)}")
    files = configs[name]["data_files"]
    if not isinstance(files, list) or not all(isinstance(entry, dict) for entry in files):
        files = [{"split": DEFAULT_SPLIT, "path": files}]
    splits = {entry["split"]: entry["path"] for entry in files}
    if wanted.name not in splits:
        raise ValueError(f"{where} has no split {wanted.name!r}: {listed(wanted.name, splits)}")
    path = splits[wanted.name]
    return [path] if isinstance(path, str) else list(path)


def _default_config(configs: dict[str, Any], where: str) -> str:
    chosen = [name for name, config in configs.items() if config.get("default")] or [*configs]
    if len(chosen) > 1 and "default" in configs:
        return "default"
    if len(chosen) > 1:
        raise ValueError(f"{where} has several configurations ({', '.join(configs)}): write NAME:CONFIG/SPLIT")
    return chosen[0]


def _card(folder: Path) -> dict[str, Any]:
    """The metadata at the top of README.md; empty where there is none."""
    path = folder / CARD
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    found = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    try:
        card = yaml.safe_load(found.group(1)) if found else {}
    except yaml.YAMLError:
        card = {}
    return card if isinstance(card, dict) else {}


def _shown(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) + more) if names else "no .parquet, .json or .jsonl file"
