"""Which chat template `generator.chat_template.*` means: a file's, one of the tokenizer's by name, or a known one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skyrl.train.config.problems import listed

KEY = "generator.chat_template"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Public names. What tells them apart there is which thoughts of earlier turns are rendered again; here no turn is
# rendered twice, so that both keep every token as it was sampled.
KNOWN = {"qwen3_with_thinking": CHATML, "qwen3_without_thinking": CHATML}
DROPS_THOUGHTS = "qwen3_without_thinking"


def chosen_template(chosen: Any, tokenizer: Any, *, max_turns: int) -> str | None:
    """The template, None for the tokenizer's default one. Raises ValueError for one that is not there, and for one that
    would take thoughts out of earlier turns: what follows them was sampled with them in the context."""
    name = chosen.name_or_path
    if name is None:
        return None
    if chosen.source == "file":
        path = Path(name).expanduser()
        if not path.is_file():
            raise ValueError(f"{KEY}.name_or_path: no such file: {path}")
        return path.read_text(encoding="utf-8")
    own = getattr(tokenizer, "chat_template", None)
    by_name = {**KNOWN, **(own if isinstance(own, dict) else {})}
    if name not in by_name:
        raise ValueError(
            f"{KEY}.name_or_path={name!r} with source='name': {listed(name, by_name)}; for a file set "
            f"{KEY}.source=file and give its path"
        )
    if name == DROPS_THOUGHTS and max_turns > 1:
        raise ValueError(
            f"{KEY}.name_or_path={name}: earlier turns keep their thoughts here, because the later ones were sampled "
            f"after them; write qwen3_with_thinking, or set generator.chat_template_kwargs={{enable_thinking: false}}"
        )
    return by_name[name]
