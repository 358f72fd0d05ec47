"""What becomes of a public key that this version's configuration does not have: listed as unused, or refused.

The names, types and defaults of the public tree are in `public_keys.tsv`. A key is listed where it cannot change the
run (parameters of something that is off, settings of an engine that is not here, a value that is the public default);
it is refused where leaving it out would change what is trained.
"""

from __future__ import annotations

import ast
import csv
import fnmatch
from functools import cache
from importlib import resources
from typing import Any

from skyrl.train.config.overrides import Path_

NOT_THE_DEFAULT = "known key, not honoured by this version: leave it out or set its public default {default}"

# Keys that cannot change this run, by pattern, and why.
UNUSED = {
    "trainer.ref.model.lora.*": "the reference is the model without an adapter",
    "trainer.algorithm.tis_imp_ratio_cap": "it is read with trainer.algorithm.use_tis=true only",
    "generator.inference_engine.fully_sharded_loras": "each GPU holds whole factors; the numbers are the same",
}  # fmt: skip

# What to do instead, where there is more to say than that the key is not honoured.
INSTEAD: dict[str, str] = {}

# Keys that users of other versions still write: what to write instead.
RENAMED = {
    "generator.num_inference_engines": "generator.inference_engine.num_engines",
    "generator.inference_engine_tensor_parallel_size": "generator.inference_engine.tensor_parallel_size",
    "generator.inference_engine_pipeline_parallel_size": "generator.inference_engine.pipeline_parallel_size",
    "generator.inference_engine_data_parallel_size": "generator.inference_engine.data_parallel_size",
    "generator.inference_engine.remote_urls": "generator.inference_engine.external_server_urls",
    "generator.inference_engine.external_proxy_url": "generator.inference_engine.external_server_urls="
    "['grpc://host:port'] (the trainer balances over the servers itself)",
    "generator.remote_inference_engine_urls": "generator.inference_engine.external_server_urls",
}
GONE = {
    "generator.inference_engine.enable_http_endpoint": "servers speak gRPC, at the url that they log",
    "generator.inference_engine.override_existing_update_group": "there is no update group",
    "generator.enable_http_endpoint": "servers speak gRPC, at the url that they log",
    "generator.override_existing_update_group": "there is no update group",
    "generator.async_engine": "generation is asynchronous, always",
    **{
        f"{section}.{name}": "give it to both sides: generator.inference_engine.engine_init_kwargs.hf_overrides."
        "rope_parameters and trainer.policy.model_config_kwargs.rope_parameters"
        for section in ("trainer", "generator", "generator.inference_engine.engine_init_kwargs")
        for name in ("rope_scaling", "rope_theta", "rope_parameters")
    },
}  # fmt: skip


def gone(path: Path_) -> str | None:
    """What to do instead of a key that public SkyRL refuses too; None where the key is none of them."""
    prefixes = (".".join(path[:length]) for length in range(1, len(path) + 1))
    return next((GONE[prefix] for prefix in prefixes if prefix in GONE), None)


@cache
def public_defaults() -> dict[str, Any]:
    """Every public leaf key with its default."""
    text = resources.files("skyrl.train.config").joinpath("public_keys.tsv").read_text()
    rows = list(csv.reader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
    return {row[0]: _literal(row[2]) for row in rows}


def verdict(path: Path_, value: Any) -> tuple[str, str] | None:
    """("unused", why) or ("refused", what to do) for a public key without a place here; None for an unknown key."""
    dotted = ".".join(path)
    owner = _public_owner(path)
    if owner is None:
        return None
    is_default = value == public_defaults()[owner] and type(value) is type(public_defaults()[owner])
    refusal = "refused", INSTEAD.get(dotted, NOT_THE_DEFAULT.format(default=_shown(public_defaults()[owner])))
    for pattern, why in UNUSED.items():
        if fnmatch.fnmatchcase(dotted, pattern):
            return "unused", why
    if is_default:
        return "unused", "it has its public default"
    return refusal


def _public_owner(path: Path_) -> str | None:
    """The public leaf that a path is, or lies in (free mappings); None where there is none."""
    for length in range(len(path), 0, -1):
        dotted = ".".join(path[:length])
        if dotted in public_defaults():
            inside_mapping = isinstance(public_defaults()[dotted], dict)
            return dotted if length == len(path) or inside_mapping else None
    return None


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return "{}" if isinstance(value, dict) else str(value)
