"""Whether every key, module and file that the pages for users name is there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from skyrl.train.backends import OLDER_SPELLING, installed, load_plugin
from skyrl.train.config import combine_parts, make_config, schema
from skyrl.train.config.absent import EXAMPLES
from skyrl.train.config.known_keys import GONE, RENAMED, public_defaults
from skyrl.train.config.public_flags import TRANSLATED

PACKAGES = Path(__file__).parents[2]
PAGES = [page for folder in ("skyrl-core", "skyrl-arctic") for page in sorted((PACKAGES / folder).glob("**/*.md"))
         if page.parent.name == "docs" or page.name == "README.md"]  # fmt: skip
KEY = re.compile(r"(?<![\w./])(?:trainer|generator|data|environment)(?:\.[\w*]+)+")
CONFIG = make_config(**combine_parts(*(load_plugin(name).config_parts for name in installed())))
OTHER_NAMES = {*public_defaults(), *RENAMED, *GONE, *EXAMPLES, *TRANSLATED, OLDER_SPELLING,
               "generator.inference_engine.async_engine"}  # fmt: skip


def is_key(name: str) -> bool:
    """Whether a key, a section or, with `*` in it, some key of that form is known."""
    if "*" not in name:
        return name in OTHER_NAMES or schema.find(CONFIG, tuple(name.split("."))) is not None
    form = re.compile(re.escape(name).replace(r"\*", ".*"))
    return any(form.match(known) for known in (*schema.key_names(CONFIG), *(f"{other}*" for other in OTHER_NAMES)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PACKAGES)))
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    assert [name for name in sorted(set(KEY.findall(text))) if not is_key(name.rstrip("."))] == []
    modules = set(re.findall(r"python -m ([\w.]+)", text))
    assert [name for name in sorted(modules) if importlib.util.find_spec(name) is None] == []
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link}
    assert [link for link in sorted(links) if not (page.parent / link).exists()] == []
