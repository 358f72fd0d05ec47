"""How the GSM8K data set becomes the rows that public recipes train on.

    python -m skyrl.train.data.gsm8k --output_dir ~/data/gsm8k                   # openai/gsm8k from the hub
    python -m skyrl.train.data.gsm8k --output_dir ~/data/gsm8k --source FOLDER   # its files, on this machine
    python -m skyrl.train.data.gsm8k --output_dir ~/data/gsm8k_multi_turn --max_turns 5

It writes train.parquet and validation.parquet (the data set's `test` split). A source's rows have `question` and
`answer`, whose last line is `#### NUMBER`; a row without it is refused by name.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from skyrl.train.data.files import read_rows
from skyrl.train.data.sources import CARD, files_of

SOURCE = "openai/gsm8k"
CONFIG = "main"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
MULTI_TURN_INSTRUCTION = (
    "Solve the problem over several turns. In each turn write down your reasoning and, at its end, the answer that you "
    "have so far as '#### ANSWER'."
)
FINAL_NUMBER = re.compile(r"#### (-?[0-9.,]+)\s*$")
SPLITS = {"train": "train", "validation": "test"}


def ground_truth(answer: str) -> str | None:
    """The number after the last `####`, without commas; None where there is none."""
    found = FINAL_NUMBER.search(answer.strip())
    return found.group(1).replace(",", "") if found else None


def row(raw: dict[str, Any], *, split: str, index: int, where: str, max_turns: int = 1) -> dict[str, Any]:
    """One row as a trainer reads it. Raises ValueError, which begins with `where`, for a row that is none of GSM8K."""
    if not (isinstance(raw.get("question"), str) and isinstance(raw.get("answer"), str)):
        raise ValueError(f"{where}: expected the columns question and answer, got {', '.join(raw)}")
    truth = ground_truth(raw["answer"])
    if truth is None:
        raise ValueError(f"{where}: its answer does not end in '#### NUMBER': {raw['answer'][-60:]!r}")
    extra: dict[str, Any] = {"split": split, "index": index, "answer": raw["answer"], "question": raw["question"]}
    if max_turns > 1:
        extra["max_turns"] = max_turns
    instruction = INSTRUCTION if max_turns == 1 else MULTI_TURN_INSTRUCTION
    return {
        "data_source": SOURCE,
        "prompt": [{"role": "user", "content": f"{raw['question']} {instruction}"}],
        "env_class": "gsm8k" if max_turns == 1 else "gsm8k_multi_turn",
        "reward_spec": {"method": "rule", "ground_truth": truth},
        "extra_info": extra,
    }


def prepare(output: Path, *, source: str = SOURCE, max_rows: int | None = None, max_turns: int = 1) -> dict[str, int]:
    """Writes both files and returns their numbers of rows. Raises ValueError for whatever is wrong with the source."""
    output.mkdir(parents=True, exist_ok=True)
    counts = {}
    for name, split in SPLITS.items():
        rows = []
        for path in files_of(f"{source}:{_config(source)}{split}", key="--source"):
            rows += [(raw, f"{path}, row {i}") for i, raw in enumerate(read_rows(path, key="--source"))]
        made = [
            row(raw, split=split, index=index, where=where, max_turns=max_turns)
            for index, (raw, where) in enumerate(rows[:max_rows])
        ]
        pq.write_table(pa.Table.from_pylist(made), output / f"{name}.parquet", write_page_checksum=True)
        counts[name] = len(made)
    return counts


def _config(source: str) -> str:
    """A folder of bare files has no configurations to choose from."""
    folder = Path(source).expanduser()
    return f"{CONFIG}/" if not folder.is_dir() or (folder / CARD).is_file() else ""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 2 for a source that cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", "--output-dir", type=Path, default=Path("~/data/gsm8k"))
    parser.add_argument("--source", default=SOURCE, help="a folder or a data set of the hub (unset: %(default)s)")
    parser.add_argument("--max_rows", "--max-rows", type=int, help="rows of each file at most")
    parser.add_argument("--max_turns", "--max-turns", type=int, default=1, help="above 1: rows for gsm8k_multi_turn")
    options = parser.parse_args(argv)
    output = options.output_dir.expanduser()
    try:
        counts = prepare(output, source=options.source, max_rows=options.max_rows, max_turns=options.max_turns)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(", ".join(f"{output / name}.parquet: {count} rows" for name, count in counts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
