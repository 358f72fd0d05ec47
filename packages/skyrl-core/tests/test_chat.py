"""Whether observations become exactly the tokens that a template puts between two assistant turns."""

import numpy as np
import pytest
from skyrl.train.config import GeneratorConfig
from skyrl.train.generator.chat import ChatFormat

NO = [{"role": "user", "content": "no"}]


def test_a_prompt_ends_with_the_generation_prompt(chat_tokenizer):
    ids = ChatFormat(chat_tokenizer).prompt_ids([{"role": "user", "content": "hi"}])
    assert chat_tokenizer.decode(ids) == "<bos>user\nhi<eos>\n<bos>assistant\n"
    assert ids.dtype == np.int32


@pytest.mark.parametrize(
    ("template", "told"),
    [(None, "the model's tokenizer has no chat template: give one"), ("{% for %}", "cannot render these messages")],
)
def test_a_template_that_is_missing_or_wrong_is_told(chat_tokenizer, monkeypatch, template, told):
    monkeypatch.setattr(chat_tokenizer, "chat_template", template)
    with pytest.raises(ValueError, match=told):
        ChatFormat(chat_tokenizer).prompt_ids(NO)


@pytest.mark.parametrize(
    ("ended", "close_turns", "between"),
    [
        (True, True, "\n<bos>user\nno<eos>\n<bos>assistant\n"),
        (False, True, "<eos>\n<bos>user\nno<eos>\n<bos>assistant\n"),
        (False, False, "\n<bos>user\nno<eos>\n<bos>assistant\n"),
    ],
    ids=["closed by the model", "closed for it", "left open"],
)
def test_an_observation_follows_a_turn_as_the_template_has_it(chat_tokenizer, ended, close_turns, between):
    chat = ChatFormat(chat_tokenizer, close_turns=close_turns)
    last = chat_tokenizer.eos_token_id if ended else 5
    assert chat_tokenizer.decode(chat.observation_ids(NO, last, ended=ended)) == between


def test_two_turns_token_by_token_are_what_the_template_makes_of_the_whole_conversation(chat_tokenizer):
    chat, eos = ChatFormat(chat_tokenizer), chat_tokenizer.eos_token_id
    first = [{"role": "user", "content": "1+1="}]
    answer = [*chat_tokenizer.encode("3", add_special_tokens=False), eos]
    grown = np.concatenate([chat.prompt_ids(first), answer, chat.observation_ids(NO, eos, ended=True)])
    whole = chat.prompt_ids([*first, {"role": "assistant", "content": "3"}, *NO])
    assert grown.tolist() == whole.tolist()


def test_a_template_that_only_joins_adds_the_observation_alone(tiny_tokenizer):
    chat = ChatFormat(tiny_tokenizer)
    ids = chat.observation_ids(NO, tiny_tokenizer.eos_token_id, ended=True)
    assert ids.tolist() == tiny_tokenizer.encode("no", add_special_tokens=False)


def test_in_one_message_mode_an_observation_is_its_raw_text(chat_tokenizer):
    chat = ChatFormat(chat_tokenizer, conversation=False)
    assert chat_tokenizer.decode(chat.observation_ids(NO, 5, ended=False)) == "no"


def test_a_turn_is_read_without_special_tokens(tiny_tokenizer):
    ids = [*tiny_tokenizer.encode("015", add_special_tokens=False), tiny_tokenizer.eos_token_id]
    assert ChatFormat(tiny_tokenizer).text(np.array(ids)) == "015"


def test_a_template_from_a_file_replaces_the_tokenizers_own(tiny_tokenizer, tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %}{{ tail }}")
    cfg = GeneratorConfig.model_validate(
        {"chat_template": {"source": "file", "name_or_path": str(path)}, "chat_template_kwargs": {"tail": "!"}}
    )
    ids = ChatFormat.from_config(cfg, tiny_tokenizer).prompt_ids(NO)
    assert tiny_tokenizer.decode(ids) == "[no]!"


def named(name: str, **generator: object) -> GeneratorConfig:
    return GeneratorConfig.model_validate({"chat_template": {"name_or_path": name}, **generator})


def test_a_known_template_is_found_by_its_public_name(chat_tokenizer):
    chat = ChatFormat.from_config(named("qwen3_with_thinking"), chat_tokenizer)
    text = "<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"
    assert chat_tokenizer.decode(chat.prompt_ids(NO)) == text
    between = "<|im_end|>\n" + text
    assert chat_tokenizer.decode(chat.observation_ids(NO, 5, ended=False)) == between


def test_a_template_that_takes_thoughts_away_is_for_one_turn(chat_tokenizer):
    assert ChatFormat.from_config(named("qwen3_without_thinking"), chat_tokenizer).prompt_ids(NO).size
    with pytest.raises(ValueError, match="earlier turns keep their thoughts here.* write qwen3_with_thinking"):
        ChatFormat.from_config(named("qwen3_without_thinking", max_turns=2), chat_tokenizer)


def test_one_of_several_templates_of_the_tokenizer_is_chosen_by_name(chat_tokenizer, monkeypatch):
    monkeypatch.setattr(chat_tokenizer, "chat_template", {"default": "d", "brief": "{{ messages[0]['content'] }}!"})
    assert chat_tokenizer.decode(ChatFormat.from_config(named("brief"), chat_tokenizer).prompt_ids(NO)) == "no!"
    with pytest.raises(ValueError, match=r"known: brief, default, qwen3_with_thinking.*did you mean brief\?"):
        ChatFormat.from_config(named("breif"), chat_tokenizer)


@pytest.mark.parametrize(("source", "expected"), [("file", "no such file: nowhere.jinja"), ("name", "source=file")])
def test_a_template_that_is_not_there_is_refused(tiny_tokenizer, source, expected):
    cfg = GeneratorConfig.model_validate({"chat_template": {"source": source, "name_or_path": "nowhere.jinja"}})
    with pytest.raises(ValueError, match=expected):
        ChatFormat.from_config(cfg, tiny_tokenizer)


def test_a_template_without_assistant_messages_allows_no_second_turn(tiny_tokenizer):
    chat = ChatFormat(tiny_tokenizer, {"chat_template": "{{ messages[0]['content'] }}"})
    with pytest.raises(ValueError, match="leaves out assistant messages"):
        chat.observation_ids(NO, 2, ended=True)
