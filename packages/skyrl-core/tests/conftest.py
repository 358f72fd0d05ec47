"""What the tests of this package share: the tiny model's tokenizer, and one in the style of a chat model."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import skyrl.train.quickstart
from skyrl.train.algorithms import tables
from skyrl_rollout.reference.process import ReferenceServer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

TINY_MODEL = Path(skyrl.train.quickstart.__file__).parent / "tiny_model"

CHAT_TEMPLATE = (
    "{% for m in messages %}<bos>{{ m['role'] }}\n{{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)


@pytest.fixture(autouse=True)
def _registered_functions_stay_in_their_test(monkeypatch: pytest.MonkeyPatch) -> None:
    for table in tables._TABLES.values():
        monkeypatch.setattr(table, "_functions", dict(table._functions))
        monkeypatch.setattr(table, "_added", dict(table._added))


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; its template only joins the contents."""
    return AutoTokenizer.from_pretrained(TINY_MODEL)


@pytest.fixture(scope="session")
def chat_tokenizer() -> PreTrainedTokenizerFast:
    """The same tokens, with every message between <bos> and the end-of-sequence token."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def reference_url() -> Iterator[str]:
    """A reference server in a process of its own, which serves the tiny model's shape."""
    with ReferenceServer("--model", str(TINY_MODEL)) as server:
        yield server.url
