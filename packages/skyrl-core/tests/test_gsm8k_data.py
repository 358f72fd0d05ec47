"""Whether the GSM8K preparation makes the rows of public recipes from the data set's own files, without a network."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from skyrl.train import environments
from skyrl.train.data import gsm8k
from skyrl.train.data.prompts import PromptDataset
from skyrl.train.generator.chat import ChatFormat

QUESTION = {"question": "Ann has 1,000 pens and buys 234. How many?", "answer": "1,000 + 234 = 1,234\n#### 1,234"}
OTHER = {"question": "What is 3 - 5?", "answer": "3 - 5 = <<3-5=-2>>-2\n#### -2"}


@pytest.fixture
def source(tmp_path) -> Path:
    folder = tmp_path / "raw"
    folder.mkdir()
    (folder / "train.jsonl").write_text(json.dumps(QUESTION) + "\n" + json.dumps(OTHER) + "\n")
    (folder / "test.jsonl").write_text(json.dumps(OTHER) + "\n")
    return folder


def test_a_row_is_what_public_recipes_read(source, tmp_path):
    assert gsm8k.prepare(tmp_path / "out", source=str(source)) == {"train": 2, "validation": 1}
    row = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()[0]
    instruction = 'Let\'s think step by step and output the final answer after "####".'
    assert row == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{QUESTION['question']} {instruction}"}],
        "env_class": "gsm8k",
        "reward_spec": {"method": "rule", "ground_truth": "1234"},
        "extra_info": {"split": "train", "index": 0, **QUESTION},
    }


@pytest.mark.parametrize(("max_turns", "env"), [(1, "gsm8k"), (3, "gsm8k_multi_turn")])
def test_its_environment_scores_the_answer(source, tmp_path, tiny_tokenizer, max_turns, env):
    gsm8k.prepare(tmp_path, source=str(source), max_turns=max_turns, max_rows=1)
    (task,) = PromptDataset([tmp_path / "train.parquet"], ChatFormat(tiny_tokenizer), max_prompt_length=999)
    assert task.env_class == env
    made = environments.make(env, env_config={}, extras=task.env_extras)
    assert made.step("so #### 1,234")["reward"] == 1.0


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (
            {"question": "?", "answer": "seven"},
            r"train.jsonl, row 0: its answer does not end in '#### NUMBER'",
        ),
        ({"prompt": "?"}, r"train.jsonl, row 0: expected the columns question and answer, got prompt"),
    ],
)
def test_a_row_that_is_none_of_gsm8k_is_named(source, tmp_path, row, told):
    (source / "train.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match=told):
        gsm8k.prepare(tmp_path / "out", source=str(source))


def test_the_command_writes_both_files_or_says_what_is_wrong(source, tmp_path):
    command = [sys.executable, "-m", "skyrl.train.data.gsm8k", "--output_dir", tmp_path / "out", "--source"]
    done = subprocess.run([*command, source], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0 and "validation.parquet: 1 rows" in done.stdout
    (source / "test.jsonl").unlink()
    failed = subprocess.run([*command, source], capture_output=True, text=True, check=False, timeout=60)
    assert failed.returncode == 2 and "has no file of the split 'test'; it has train.jsonl" in failed.stderr
