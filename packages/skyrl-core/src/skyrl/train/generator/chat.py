"""How messages become token ids: the prompt once through the chat template, observations as what follows a turn.

Nothing that a model sampled is ever turned into text and back; only text that comes from outside is tokenised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from skyrl.train.generator.templates import chosen_template

# Stands for an assistant turn when the template is asked what follows one.
_TURN = "assistant-turn"

Messages = Sequence[Mapping[str, str]]


class Tokenizer(Protocol):
    """What is needed of a `transformers` tokenizer."""

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...
    def encode(self, text: str, **kwargs: Any) -> list[int]: ...
    def decode(self, token_ids: Any, **kwargs: Any) -> str: ...


class ChatFormat:
    """The tokenizer's chat template for one run.

    conversation: observations are messages of their own turn; else their raw text follows the assistant's.
    close_turns: a turn that did not end by itself is closed, with tokens that are not trained on.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        kwargs: Mapping[str, Any] | None = None,
        *,
        conversation: bool = True,
        close_turns: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self.conversation = conversation
        self.close_turns = close_turns
        self._kwargs = dict(kwargs or {})

    @staticmethod
    def from_config(generator_cfg: Any, tokenizer: Tokenizer) -> ChatFormat:
        """The format that `generator.*` asks for. Raises ValueError for a template that is not there."""
        kwargs = dict(generator_cfg.chat_template_kwargs)
        template = chosen_template(generator_cfg.chat_template, tokenizer, max_turns=generator_cfg.max_turns)
        return ChatFormat(
            tokenizer,
            kwargs if template is None else {**kwargs, "chat_template": template},
            conversation=generator_cfg.use_conversation_multi_turn,
            close_turns=generator_cfg.append_eos_token_after_stop_str_in_multi_turn,
        )

    def prompt_ids(self, messages: Messages) -> np.ndarray:
        """int32 [P]: the conversation with the generation prompt. ValueError where there is no template, or a wrong
        one."""
        ids = self._applied(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        return np.asarray(ids, dtype=np.int32)

    def observation_ids(self, observations: Messages, last_token: int, *, ended: bool) -> np.ndarray:
        """int32 [k]: what follows an assistant turn so that the model answers `observations` next.

        `last_token` is the turn's last one; ended: the model closed the turn itself. The closing token is then not
        repeated, whatever template it belongs to.
        """
        if not self.conversation:
            return self._encode("".join(m["content"] for m in observations))
        turn = {"role": "assistant", "content": _TURN}
        text = self._render([{"role": "user", "content": "?"}, turn, *observations], add_generation_prompt=True)
        ids = self._encode(text.partition(_TURN)[2])
        closing = self._encode(self._render([{"role": "user", "content": "?"}, turn]).partition(_TURN)[2])
        has_closing = len(closing) > 0 and len(ids) > 0 and closing[0] == ids[0]
        drop = has_closing and (ids[0] == last_token if ended else not self.close_turns)
        return ids[1:] if drop else ids

    def text(self, token_ids: np.ndarray) -> str:
        """A turn as its environment reads it, without special tokens."""
        return self.tokenizer.decode([int(i) for i in token_ids], skip_special_tokens=True)

    def _render(self, messages: Messages, *, add_generation_prompt: bool = False) -> str:
        text = self._applied(messages, add_generation_prompt=add_generation_prompt, tokenize=False)
        if _TURN not in text:
            raise ValueError(
                "the chat template leaves out assistant messages, so a second turn has no place: "
                "set generator.max_turns=1, or give another template with generator.chat_template"
            )
        return text

    def _applied(self, messages: Messages, **options: Any) -> Any:
        if "chat_template" not in self._kwargs and not getattr(self.tokenizer, "chat_template", None):
            raise ValueError(
                "the model's tokenizer has no chat template: give one with generator.chat_template.source=file and "
                "generator.chat_template.name_or_path=FILE.jinja"
            )
        try:
            return self.tokenizer.apply_chat_template([dict(m) for m in messages], **options, **self._kwargs)
        except Exception as error:
            raise ValueError(f"the chat template cannot render these messages: {error}") from error

    def _encode(self, text: str) -> np.ndarray:
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)
