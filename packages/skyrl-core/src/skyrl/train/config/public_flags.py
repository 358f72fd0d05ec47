"""What becomes of each public flag, as the tables of a page: same, different, deciding nothing, refused, renamed.

    python -m skyrl.train.config.public_flags packages/skyrl-core/docs/from-skyrl.md

brings the page's generated part up to date.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from skyrl.train.config import differences, schema
from skyrl.train.config.absent import ABSENT, EXAMPLES
from skyrl.train.config.inert import ALWAYS, INERT, why_inert
from skyrl.train.config.known_keys import GONE, RENAMED, UNUSED, public_defaults
from skyrl.train.config.root import SkyRLTrainConfig

BEGIN, END = "<!-- begin: made by skyrl.train.config.public_flags -->", "<!-- end -->"

# What `build.py` translates, beside renamed keys.
TRANSLATED = {
    "trainer.use_sample_packing": "`trainer.remove_microbatch_padding`",
    "trainer.log_example_interval": "`trainer.print_example_interval`",
    "trainer.algorithm.use_tis": "`trainer.algorithm.off_policy_correction.tis_ratio_type=token`",
    "trainer.algorithm.tis_imp_ratio_cap": "`trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high`",
    "trainer.strategy=fsdp2": "`trainer.strategy=fsdp`",
    "generator.inference_engine.async_engine=true": "nothing: generation is asynchronous; `false` is refused",
    "trainer.override_entrypoint=integrations.NAME.entrypoint": "`trainer.backend=NAME`",
}


def as_markdown() -> str:
    """The generated part of the page, without its markers."""
    return "\n\n".join(
        (
            "## Same\n\nThe public name, type and default, and the public meaning:",
            "\n".join(_same()),
            "## Another default",
            differences.as_markdown(),
            "## Another meaning",
            _table(("key", "here"), ALWAYS.items()),
            "## Read, and deciding nothing\n\nThe report at start lists them as unused, with this reason.",
            _table(("key", "why"), {**INERT, **{k: v for k, v in UNUSED.items() if "tis_imp" not in k}}.items()),
            "## Refused\n\nEach with one sentence, before anything starts.",
            _table(("key", "what is told"), _refused()),
            "## Older names",
            _table(("older", "write"), {**{k: f"`{v}`" for k, v in RENAMED.items()}, **TRANSLATED}.items()),
        )
    )


def _same() -> Iterator[str]:
    """One line for each section of the tree."""
    different = {row.key for row in differences.differences()}
    names: dict[str, list[str]] = defaultdict(list)
    for dotted in public_defaults():
        path = tuple(dotted.split("."))
        if dotted in different or dotted in ALWAYS or why_inert(dotted) is not None:
            continue
        if schema.find(SkyRLTrainConfig, path) is not None:
            names[".".join(path[:-1])].append(path[-1])
    for section, keys in names.items():
        yield f"- `{section}`: {', '.join(f'`{key}`' for key in keys)}"


def _refused() -> Iterator[tuple[str, str]]:
    for absent in ABSENT:
        yield absent.key, absent.missing
    yield "trainer.strategy=megatron", "no Megatron engine here: a backend that needs none runs the same recipe"
    for start, missing in EXAMPLES.items():
        yield f"{start}*", missing
    yield from GONE.items()


def _table(head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"| `{key}` | {text} |" for key, text in rows]
    return "\n".join([f"| {head[0]} | {head[1]} |", "|---|---|", *lines])


def brought_up_to_date(page: str) -> str:
    """The page with its generated part made anew. ValueError where it has no markers."""
    before, found, rest = page.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise ValueError(f"the page has no part between {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{as_markdown()}\n\n{END}{after}"


def main() -> None:
    """Rewrites the page that the first argument names."""
    page = Path(sys.argv[1])
    page.write_text(brought_up_to_date(page.read_text()))


if __name__ == "__main__":
    main()
