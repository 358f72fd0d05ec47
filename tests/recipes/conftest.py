"""What recipes find on a user's machine: their models, a tracker's account, what their own scripts register."""

from __future__ import annotations

from pathlib import Path

import own_scripts
import public_recipes
import pytest
from skyrl.train.algorithms import tables


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return public_recipes.home(tmp_path_factory.mktemp("home"))


@pytest.fixture(autouse=True)
def _as_a_user_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is registered here stays in its test."""
    monkeypatch.setenv("WANDB_API_KEY", "not-a-key")
    for table in tables._TABLES.values():
        monkeypatch.setattr(table, "_functions", dict(table._functions))
        monkeypatch.setattr(table, "_added", dict(table._added))
    own_scripts.register()
