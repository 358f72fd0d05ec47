"""The launch commands of public recipes as a shell would give them, from the folder that lies beside the project."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT.parent / "shared" / "recipes" / "train_recipes.jsonl"
TINY_MODEL = ROOT / "packages/skyrl-core/src/skyrl/train/quickstart/tiny_model"
ABSENT = f"the public recipes are not beside the project ({FILE})"

# What the shell would put in, one value for all recipes. $HOME is the folder that `home` makes.
VARIABLES = {
    "$SYNC_DIR": "/data/sync",
    "$(pwd)": "/work",
    '$(dirname "$0")': "/recipes",
    "$(date -u +%Y%m%dT%H%M%SZ)": "20260801T000000Z",
    "$(date +%Y%m%d_%H%M%S)": "20260801_000000",
    "${LORA_RANK}": "0",
    "${LORA_ALPHA}": "16",
}
# Models that recipes expect in $HOME, where their users trained or downloaded them.
MODELS_AT_HOME = ("qwen2.5-math", "moonlight16b", "ckpts/dapo_qwen3_4b_base/global_step_90")
DELEGATES = "delegates:"


@dataclass(frozen=True)
class Recipe:
    """One command: the script that it is from, the module that it starts, and its overrides, with `$HOME` in them."""

    script: str
    entrypoint: str
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.script.removeprefix("examples/").removesuffix(".sh")

    @property
    def strategy(self) -> str:
        """fsdp or megatron."""
        return "megatron" if "trainer.strategy=megatron" in self.overrides else "fsdp"

    def argv(self, home: Path) -> list[str]:
        return [argument.replace("$HOME", str(home)) for argument in self.overrides]


def expanded(argument: str) -> str:
    """The argument with every variable but $HOME replaced; AssertionError for one that the table lacks."""
    for name, value in VARIABLES.items():
        argument = argument.replace(name, value)
    rest = argument.replace("$HOME", "")
    assert not re.search(r"\$[A-Za-z({]", rest), f"{argument}: no value for a variable in it"
    return argument


def recipes() -> list[Recipe]:
    """All of them, in the file's order; none where the file is absent. One that calls another script has its overrides
    after that script's."""
    if not FILE.is_file():
        return []
    rows = {row["script"]: row for row in map(json.loads, FILE.read_text().splitlines())}
    out = []
    for script, row in rows.items():
        entrypoint, overrides = row["entrypoint"], row["overrides"]
        if entrypoint.startswith(DELEGATES):
            called = rows[entrypoint.removeprefix(DELEGATES)]
            entrypoint, overrides = called["entrypoint"], [*called["overrides"], *overrides]
        out.append(Recipe(script, entrypoint, tuple(map(expanded, overrides))))
    return out


def home(folder: Path) -> Path:
    """`folder` as a user's home, with the models that recipes expect there."""
    for name in MODELS_AT_HOME:
        shutil.copytree(TINY_MODEL, folder / name)
    return folder
