"""Whether the text of a sample has come to one of its stop strings, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"  # what bytes decode to that are not a whole character yet
LONGEST_CHARACTER = 8  # tokens that may be needed for one; what is unfinished after more is no text


class StopStrings:
    """Follows one sample. Special tokens are no text, as in what a reader of the answer sees."""

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        self._tokenizer, self._texts = tokenizer, tuple(texts)
        self._kept = max(map(len, texts)) - 1  # characters of earlier tokens that a match may begin with
        self._tail = ""
        self._context: list[int] = []  # tokens already read, which decide whether a space comes before the next
        self._unread: list[int] = []

    def match(self, token: int, *, may_end: bool) -> str | None:
        """Takes one more token and returns the stop string that it completes; none while not `may_end`."""
        self._unread.append(token)
        known = self._decode(self._context)
        text = self._decode(self._context + self._unread)
        if text.endswith(UNFINISHED) and len(self._unread) < LONGEST_CHARACTER:
            return None
        self._context, self._unread = self._unread, []
        old, searched = len(self._tail), self._tail + text[len(known) :]
        self._tail = searched[-self._kept :] if self._kept else ""
        if not may_end:
            return None
        # a match ends in the new text: one that min_tokens forbade before does not count now
        places = ((searched.find(t, max(old - len(t) + 1, 0)), i) for i, t in enumerate(self._texts))
        found = [(place + len(self._texts[i]), i) for place, i in places if place >= 0]
        return self._texts[min(found)[1]] if found else None

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True) if token_ids else ""
