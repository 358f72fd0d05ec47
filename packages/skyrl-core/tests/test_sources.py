"""Whether an entry of data.train_data finds its files: on this machine, in the hub's cache, or not at all, by name."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants
from skyrl.train.data.files import read_rows
from skyrl.train.data.prompts import PromptDataset
from skyrl.train.data.sources import files_of
from skyrl.train.generator.chat import ChatFormat

KEY = "data.train_data"
CARD = """---
configs:
- config_name: main
  default: true
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: [socratic/a-*, socratic/b-*]
---
# A data set
"""


def rows(*texts: str) -> str:
    return "".join(json.dumps({"prompt": [{"role": "user", "content": text}]}) + "\n" for text in texts)


def fill(folder: Path, *names: str, card: str = "") -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(rows(name))
    if card:
        (folder / "README.md").write_text(card)
    return folder


def found(source: str, folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in files_of(source, key=KEY)]


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("", ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"]),
        (":test", ["data/test-00000-of-00001.jsonl"]),
        (":validation", ["validation.jsonl"]),
    ],
)
def test_a_split_is_found_by_the_names_of_its_files(tmp_path, split, expected):
    fill(tmp_path, *expected, "notes.txt", "data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl")
    fill(tmp_path, "data/test-00000-of-00001.jsonl", "validation.jsonl", "trainer_notes.jsonl")
    assert found(f"{tmp_path}{split}", tmp_path) == expected


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("", ["main/train-0.jsonl"]),
        (":test", ["main/test-0.jsonl"]),
        (":socratic/train", ["socratic/a-0.jsonl", "socratic/b-0.jsonl"]),
    ],
)
def test_the_card_of_a_data_set_says_which_files_a_split_has(tmp_path, split, expected):
    names = ("main/train-0.jsonl", "main/test-0.jsonl", "socratic/a-0.jsonl", "socratic/b-0.jsonl", "old/train.jsonl")
    fill(tmp_path, *names, card=CARD)
    assert found(f"{tmp_path}{split}", tmp_path) == expected


@pytest.mark.parametrize(
    ("card", "split", "told"),
    [
        ("", ":dev", r"has no file of the split 'dev'; it has train.jsonl"),
        (CARD, ":tests", r"has no split 'tests': known: test, train; did you mean test\?"),
        (CARD, ":sokratic/train", r"has no configuration 'sokratic': known: main, socratic; did you mean socratic\?"),
        (
            CARD.replace("  default: true\n", ""),
            "",
            r"several configurations \(main, socratic\): write NAME:CONFIG/",
        ),
    ],
)
def test_a_split_that_is_not_there_is_named_with_what_there_is(tmp_path, card, split, told):
    fill(tmp_path, "train.jsonl", card=card)
    with pytest.raises(ValueError, match=f"data.train_data: folder .*{told}"):
        files_of(f"{tmp_path}{split}", key=KEY)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """A cache of the hub with one data set in it, and no way to the hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    home = tmp_path / "datasets--owner--sums"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("0" * 40)
    return fill(home / "snapshots" / ("0" * 40), "main/train-0.jsonl", "main/test-0.jsonl", card=CARD)


def test_a_name_of_the_hub_is_read_from_its_cache(cache, tiny_tokenizer):
    assert found("owner/sums:test", cache) == ["main/test-0.jsonl"]
    dataset = PromptDataset(
        ["owner/sums", "owner/sums:test"], ChatFormat(tiny_tokenizer), max_prompt_length=99, default_env_class="gsm8k"
    )
    assert [t.messages[0]["content"] for t in dataset] == ["main/train-0.jsonl", "main/test-0.jsonl"]


@pytest.mark.parametrize("split", ["validation", "main/train"])
def test_a_split_that_the_cache_has_not_or_not_all_of_is_asked_of_the_hub(cache, split):
    (cache / "main/train-0.jsonl").rename(cache / "main/train-00000-of-00002.jsonl")
    with pytest.raises(ValueError, match="data.train_data=owner/sums: .*the hub did not give"):
        files_of(f"owner/sums:{split}", key=KEY)


def test_a_part_of_a_split_is_not_taken_for_the_whole(tmp_path):
    fill(tmp_path, "train-00000-of-00003.jsonl", "train-00002-of-00003.jsonl")
    with pytest.raises(ValueError, match=r"split 'train' has 2 of the 3 files of train.jsonl: copy the others too"):
        files_of(str(tmp_path), key=KEY)


def test_a_name_that_neither_this_machine_nor_the_hub_knows_is_refused(cache):
    told = "data.train_data=owner/other: no such file or folder here, and the hub did not give a data set"
    with pytest.raises(ValueError, match=told):
        files_of("owner/other", key=KEY)


def test_damage_inside_a_parquet_file_names_the_rows(tmp_path):
    path = tmp_path / "rows.parquet"
    table = pa.Table.from_pylist([{"prompt": [{"role": "user", "content": f"{i} " + "x" * 50}]} for i in range(40)])
    pq.write_table(table, path, row_group_size=10, compression="none", write_page_checksum=True)
    assert len(read_rows(path, key=KEY)) == 40
    whole = path.read_bytes()
    at = whole.index(b"25 xxxx")
    path.write_bytes(whole[:at] + b"95" + whole[at + 2 :])
    with pytest.raises(ValueError, match=r"rows.parquet .* rows 20 to 29 \(row group 2\) are damaged"):
        read_rows(path, key=KEY)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"rows.parquet \(\d+ bytes\) is not a readable parquet file"):
        read_rows(path, key=KEY)
