"""Whether rows become prompts, and whether whatever does not fit is refused by file, row and column."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import skyrl.train.quickstart
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.data.prompts import PromptDataset
from skyrl.train.generator.chat import ChatFormat

QUICKSTART = Path(skyrl.train.quickstart.__file__).parent


def row(text: str, **more: object) -> dict:
    return {"prompt": [{"role": "user", "content": text}], **more}


def write(path: Path, rows: list) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    else:
        path.write_text(json.dumps(rows))
    return path


@pytest.fixture
def read(tiny_tokenizer):
    def _read(*files: Path, max_prompt_length: int = 16, env: str | None = "arithmetic") -> PromptDataset:
        return PromptDataset(
            files, ChatFormat(tiny_tokenizer), max_prompt_length=max_prompt_length, default_env_class=env
        )

    return _read


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl"])
def test_every_format_gives_the_same_prompts(read, tmp_path, suffix):
    rows = [row("1+1=", reward_spec={"ground_truth": "2"}), row("2+2=", reward_spec={"ground_truth": "4"})]
    tasks = read(write(tmp_path / f"rows{suffix}", rows)).tasks()
    assert [t.uid for t in tasks] == ["0", "1"]
    assert tasks[1].messages == [{"role": "user", "content": "2+2="}]
    assert tasks[1].env_class == "arithmetic"
    assert tasks[1].env_extras == {"reward_spec": {"ground_truth": "4"}}


def test_a_rows_own_environment_goes_before_the_configured_one(read, tmp_path):
    tasks = read(write(tmp_path / "r.jsonl", [row("a", env_class="gsm8k"), row("b")])).tasks()
    assert [t.env_class for t in tasks] == ["gsm8k", "arithmetic"]


def test_rows_of_several_files_are_numbered_through(read, tmp_path):
    one = write(tmp_path / "a.jsonl", [row("a"), row("b")])
    two = write(tmp_path / "b.parquet", [row("c")])
    assert [(t.uid, t.messages[0]["content"]) for t in read(one, two)] == [("0", "a"), ("1", "b"), ("2", "c")]


def test_a_prompt_that_is_too_long_is_left_out_and_counted_and_keeps_its_number_free(read, tmp_path):
    dataset = read(write(tmp_path / "r.jsonl", [row("x" * 16), row("x" * 17), row("y")]))
    assert [t.uid for t in dataset] == ["0", "2"]
    assert dataset.num_dropped == 1


def test_a_data_set_of_which_nothing_is_left_is_refused(read, tmp_path):
    with pytest.raises(ValueError, match="max_prompt_length=16"):
        read(write(tmp_path / "r.jsonl", [row("x" * 17)]))


def test_fields_that_parquet_filled_with_null_do_not_reach_the_template(read, tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "a", "name": None}, {"role": "user", "content": "b", "name": "n"}]}]
    assert read(write(tmp_path / "r.parquet", rows))[0].messages[0] == {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("missing.parquet", None, "no such file: .*missing.parquet"),
        ("rows.csv", "a,b", "rows.csv is not a .parquet, .json or .jsonl file"),
        ("empty.parquet", "", r"empty.parquet \(0 bytes\) is not a readable parquet file"),
        ("bad.parquet", "PAR1 nonsense PAR1", "bad.parquet .* is not a readable parquet file"),
        ("bad.jsonl", '{"prompt": 1}\n{', "bad.jsonl, line 2 is not JSON"),
        ("none.jsonl", "\n", "none.jsonl holds no rows"),
        ("rows.jsonl", '{"question": "x"}', "rows.jsonl, row 0: no column 'prompt'; the row has question"),
        ("rows.jsonl", '{"prompt": "1+1="}', r"rows.jsonl, row 0, column 'prompt': expected a list of messages"),
        ("rows.json", '[{"prompt": [{"role": "user"}]}]', "rows.json, row 0, column 'prompt': .* got the message"),
        ("rows.json", "[3]", "rows.json, row 0: expected an object"),
        ("rows.json", "3", "rows.json: expected a list of objects, got 3"),
        ("rows.json", '[{"prompt": [{"role": "user", "content": ""}]}]', "rows.json, row 0: .* is no token at all"),
    ],
)
def test_what_cannot_be_read_is_named(read, tmp_path, name, content, expected):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=expected):
        read(tmp_path / name)


def test_a_parquet_file_without_rows_or_without_prompts_is_refused(read, tmp_path):
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "none.parquet")
    with pytest.raises(ValueError, match="none.parquet holds no rows"):
        read(tmp_path / "none.parquet")
    with pytest.raises(ValueError, match=r"other.parquet has no column 'prompt'; it has question"):
        read(write(tmp_path / "other.parquet", [{"question": "x"}]))


def test_a_row_without_any_environment_is_refused(read, tmp_path):
    with pytest.raises(ValueError, match="no 'env_class', and environment.env_class is not set"):
        read(write(tmp_path / "r.jsonl", [row("a")]), env=None)


def test_an_environment_that_does_not_exist_is_refused_before_any_rollout(tiny_tokenizer, tmp_path):
    path = write(tmp_path / "r.jsonl", [row("a", env_class="aritmetic")])
    cfg = SkyRLTrainConfig.model_validate({"data": {"train_data": [str(path)]}})
    with pytest.raises(ValueError, match="unknown environment 'aritmetic': known: .*did you mean arithmetic"):
        PromptDataset.from_config(cfg, tiny_tokenizer, "train")


def test_the_arithmetic_files_hold_disjoint_splits(read):
    train, held_out = (read(QUICKSTART / f"arithmetic_{split}.jsonl") for split in ("train", "eval"))
    assert (len(train), len(held_out)) == (900, 100)
    assert not {t.messages[0]["content"] for t in train} & {t.messages[0]["content"] for t in held_out}
    assert train[0].env_extras["reward_spec"]["ground_truth"] == f"{sum(_terms(train[0].messages[0]['content'])):03d}"


def test_how_many_prompts_were_too_long_is_told(tiny_tokenizer, tmp_path, caplog):
    path = write(tmp_path / "r.jsonl", [row("1+1="), row("x" * 600)])
    cfg = SkyRLTrainConfig.model_validate({"data": {"train_data": [str(path)]}})
    assert len(PromptDataset.from_config(cfg, tiny_tokenizer, "train")) == 1
    assert "data.train_data: 1 of 2 prompts have more than trainer.max_prompt_length=512 tokens" in caplog.text


def _terms(prompt: str) -> list[int]:
    return [int(term) for term in prompt.rstrip("=").split("+")]
