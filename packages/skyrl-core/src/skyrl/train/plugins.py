"""How a user's own modules are found, imported and asked for one of their names; what fails is told by its key.

A module is looked for where Python looks and in the folder that the run was started from.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

PLUGINS_KEY = "environment.plugins"
REWARD_KEY = "environment.reward"
REWARD_SIGNATURE = "score(prompt, response, extras)"


def import_plugins(modules: Iterable[str]) -> None:
    """Imports the modules of `environment.plugins`, which register environments, losses or estimators as they are
    imported. Raises ValueError naming the module."""
    for module in modules:
        import_own(module, key=PLUGINS_KEY)


def import_own(module: str, *, key: str) -> ModuleType:
    """The module of that name. Raises ValueError naming `key`, the module and what it raised."""
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)  # a console script starts without it, and Ray workers get this process's path
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{key}: cannot import {module!r} ({error}): give the name of a module in this folder or on PYTHONPATH"
        ) from error
    except Exception as error:
        raise ValueError(f"{key}: {module!r} raised {type(error).__name__}: {error}") from error


def reward_function(path: str) -> Callable[[list[dict[str, str]], str, dict[str, Any]], Any]:
    """What `environment.reward=module:function` names. Raises ValueError where it is not there, is no function or does
    not take (prompt, response, extras)."""
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise ValueError(f"{REWARD_KEY}={path}: expected module:function, such as my_rewards:score")
    function = getattr(import_own(module, key=REWARD_KEY), name, None)
    if function is None:
        raise ValueError(f"{REWARD_KEY}={path}: module {module!r} has no {name!r}")
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise ValueError(f"{REWARD_KEY}={path}: expected a plain function {REWARD_SIGNATURE}, got {function!r:.80}")
    try:
        inspect.signature(function).bind([], "", {})
    except TypeError as error:
        raise ValueError(f"{REWARD_KEY}={path}: it must take {REWARD_SIGNATURE}: {error}") from error
    return function
