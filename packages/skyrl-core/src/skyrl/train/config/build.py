"""From what a user wrote to a configuration object: legacy names, unknown keys, types, interpolation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from skyrl.train.config import absent, known_keys, schema
from skyrl.train.config.overrides import Overrides, Path_, Written
from skyrl.train.config.part import ConfigPart
from skyrl.train.config.problems import ConfigError, did_you_mean
from skyrl.train.config.root import SkyRLTrainConfig
from skyrl.train.config.type_errors import describe


@dataclass(frozen=True)
class Built:
    """A configuration, the keys that the user set in it, and the public keys that were read but have no place in it.

    `at_default` are those of `user_keys` that a file gives with their own default, as every written config.yaml does.
    """

    cfg: SkyRLTrainConfig
    user_keys: tuple[str, ...]
    unused: Mapping[str, str] = field(default_factory=dict)
    mapped: Mapping[str, str] = field(default_factory=dict)
    at_default: frozenset[str] = frozenset()


def build(cls: type[SkyRLTrainConfig], overrides: Overrides, *, backends: Sequence[str] = ()) -> Built:
    """ConfigError lists every unknown, refused or ill-typed key.

    `backends` are the names of installed backends: an unknown key with such a name in it is one of that backend's.
    """
    problems: list[str] = []
    overrides, mapped = _translate_legacy(overrides, problems)
    placed, unused = _place(cls, overrides, problems, backends)
    tree = _interpolated(cls, placed, problems)
    if problems:
        raise ConfigError(problems)
    try:
        cfg = cls.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(describe(cls, error, placed)) from error
    at_default = frozenset(".".join(path) for path, written in placed.items() if _changes_nothing(cls, path, written))
    return Built(cfg, tuple(".".join(path) for path in placed), unused, mapped, at_default)


def _translate_legacy(overrides: Overrides, problems: list[str]) -> tuple[Overrides, dict[str, str]]:
    """Names of earlier versions that public SkyRL still takes."""
    out, mapped = Overrides(dict(overrides.leaves)), {}
    packing, padding = "trainer.use_sample_packing", "trainer.remove_microbatch_padding"
    if overrides.get(packing) is not None and overrides.get(padding) is not None:
        problems.append(f"{packing} is the old name of {padding}: give one of them")
    if (written := out.leaves.pop(_path(packing), None)) is not None:
        out.leaves.setdefault(_path(padding), written)
        mapped[packing] = f"renamed to {padding}"
    if (written := out.leaves.pop(_path("generator.inference_engine.async_engine"), None)) is not None:
        if written.value is True:
            mapped["generator.inference_engine.async_engine"] = "generation is asynchronous, always"
        else:
            problems.append("generator.inference_engine.async_engine: only true is supported; leave it out")
    interval, newer = "trainer.log_example_interval", "trainer.print_example_interval"
    if (written := out.leaves.pop(_path(interval), None)) is not None:
        if isinstance(written.value, int) and written.value <= 0:
            mapped[interval] = f"nothing: {newer} says whether examples are printed"
        elif overrides.get(newer) is not None:
            problems.append(f"{interval} is the old name of {newer}: give one of them")
        else:
            out.leaves[_path(newer)] = written
            mapped[interval] = f"renamed to {newer}"
    _translate_tis(out, mapped, problems)
    return out, mapped


def _translate_tis(out: Overrides, mapped: dict[str, str], problems: list[str]) -> None:
    """`use_tis` and its cap, the older form of a token-level ratio. A cap that is left out is the newer key's default;
    public SkyRL multiplies every token by its own default of -1."""
    algorithm, section = "trainer.algorithm", "trainer.algorithm.off_policy_correction"
    switch, cap = f"{algorithm}.use_tis", f"{algorithm}.tis_imp_ratio_cap"
    if out.get(switch) is not True:
        return
    newer = {switch: f"{section}.tis_ratio_type", cap: f"{section}.token_tis_ratio_clip_high"}
    for old, new in newer.items():
        written = out.leaves.pop(_path(old), None)
        if written is not None and out.get(new) is not None:
            problems.append(f"{old} is the old form of {new}: give one of them")
        elif written is not None:
            value = "token" if old == switch else written.value
            out.leaves[_path(new)] = Written(value, str(value), written.source)
            mapped[old] = f"{new}={value}"


def _place(
    cls: type[SkyRLTrainConfig], overrides: Overrides, problems: list[str], backends: Sequence[str]
) -> tuple[dict[Path_, Written], dict[str, str]]:
    """Splits the keys into those of the schema and the public ones that it lacks; unknown ones become problems."""
    placed: dict[Path_, Written] = {}
    unused: dict[str, str] = {}
    examples: dict[str, list[str]] = {}
    for path, written in overrides.leaves.items():
        dotted = ".".join(path)
        if (instead := known_keys.gone(path)) is not None:
            problems.append(f"{dotted}: not a key: {instead}")
        elif schema.find(cls, path) is not None:
            placed[path] = written
        elif written.value is not None and dotted in known_keys.RENAMED:
            problems.append(f"{dotted}: write {known_keys.RENAMED[dotted]} instead")
        elif (missing := absent.example_key(path)) is not None:
            examples.setdefault(missing, []).append(dotted)
        elif (verdict := known_keys.verdict(path, written.value)) is None:
            problems.append(_unknown(cls, path, written, backends))
        elif verdict[0] == "unused":
            unused[dotted] = verdict[1]
        else:
            problems.append(f"{dotted}={written.text or written.value}: {verdict[1]}")
    problems += [f"{', '.join(keys)}: {missing}" for missing, keys in examples.items()]
    return placed, unused


def _unknown(cls: type[ConfigPart], path: Path_, written: Written, backends: Sequence[str]) -> str:
    dotted, where = ".".join(path), "" if written.text is not None else f" (in {written.source})"
    moved = ("generator", "inference_engine", *path[1:])
    if path[0] == "generator" and schema.find(cls, moved) is not None:
        return f"{dotted}: write {'.'.join(moved)} instead{where}"
    found = schema.find(cls, path[:-1]) if len(path) > 1 else None
    owner = next((name for name in backends if name in path[:-1]), None)
    if owner is not None and found is None:
        return f"{dotted}: a key of another backend{where}: set trainer.backend={owner} too, or leave it out"
    if found is not None and found[0] == path[:-1] and schema.section_class(found[1]) is None:
        return f"{dotted}: unknown key{where}: {'.'.join(path[:-1])} is a value, not a section"
    return f"{dotted}: unknown key{where}{did_you_mean(dotted, schema.key_names(cls))}"


def _interpolated(cls: type[ConfigPart], placed: Mapping[Path_, Written], problems: list[str]) -> dict[str, Any]:
    """The nested tree of values, each in the form that its key wants, with `${other.key}` replaced.

    A reference reads what the user set, else the declared default.
    """
    tree: dict[str, Any] = {}
    for path, written in placed.items():
        _insert(tree, path, _fitted(cls, path, written.value, written.text))
    referring = [path for path, written in placed.items() if "${" in str(written.value)]
    if not referring:
        return tree
    malformed = [path for path in referring if not _is_reference(placed[path].value)]
    problems += [
        f"{'.'.join(p)}={placed[p].value}: not a well-formed reference: write ${{section.key}}" for p in malformed
    ]
    if malformed:
        return tree
    known = OmegaConf.merge(OmegaConf.create(schema.declared_defaults(cls)), OmegaConf.create(tree))
    for path in referring:
        try:
            value = OmegaConf.select(known, ".".join(path))
            value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException as error:
            problems.append(f"{'.'.join(path)}={placed[path].value}: {str(error).splitlines()[0]}")
            continue
        _insert(tree, path, _fitted(cls, path, value, str(value)))
    return tree


def _changes_nothing(cls: type[ConfigPart], path: Path_, written: Written) -> bool:
    """Whether a file, and not an argument, gives the key with its default."""
    found = schema.find(cls, path)
    if found is None or written.text is not None:
        return False
    default = found[1].get_default(call_default_factory=True)
    for name in path[len(found[0]) :]:
        default = default.get(name, written) if isinstance(default, dict) else written
    default = list(default) if isinstance(default, tuple) else default
    return default == written.value and isinstance(default, bool) == isinstance(written.value, bool)


def _is_reference(value: Any) -> bool:
    try:
        OmegaConf.create({"value": value})
    except OmegaConfBaseException:
        return False
    return True


def _fitted(cls: type[ConfigPart], path: Path_, value: Any, text: str | None) -> Any:
    found = schema.find(cls, path)
    if found is None or found[0] != path or schema.section_class(found[1]) is not None or "${" in str(value):
        return value
    return schema.fitted(found[1], value, text)


def _insert(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        if not isinstance(tree.get(name), dict):
            tree[name] = {}
        tree = tree[name]
    tree[path[-1]] = value


def _path(dotted: str) -> Path_:
    return tuple(dotted.split("."))
