"""Whether a run emits the names that docs/metrics.md lists, and none of those that it says are not emitted."""

from __future__ import annotations

import fnmatch
import json
import re
from pathlib import Path

import pytest
import skyrl.train.quickstart
from skyrl.train import backends
from skyrl.train.entrypoints.main_base import BasePPOExp

QUICKSTART = Path(skyrl.train.quickstart.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
A, N, EVAL_N = "trainer.algorithm", 4, 2


def listed(heading: str) -> set[str]:
    """The names in the first column of the table under that heading."""
    part = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    (text,) = (p for p in part if p.startswith(heading))
    first = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    return {name for cell in first for name in re.findall(r"`([^`]+)`", cell)}


def expected() -> set[str]:
    """Emitted names as this test's runs have them."""
    out = set()
    for name in listed("Emitted"):
        samples = EVAL_N if name.startswith("eval/") else N
        out.add(name.replace("SOURCE", "two_words").replace("_at_N", f"_at_{samples}"))
    return out


@pytest.fixture
def names(reference_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The metric names of all steps of a small run with these overrides."""
    monkeypatch.chdir(tmp_path)
    scored = {"data_source": "two/words", "reward_spec": {"ground_truth": "3"}}
    rows = [{"prompt": [{"role": "user", "content": f"{i}+1="}], **scored} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(*overrides: str) -> set[str]:
        cfg, plugin = backends.resolve(
            [
                f"@{QUICKSTART / 'embedded.yaml'}", f"generator.inference_engine.external_server_urls={reference_url}",
                "data.train_data=rows.jsonl", "data.val_data=rows.jsonl", "environment.env_class=gsm8k_multi_turn",
                "generator.max_turns=2", "generator.max_input_length=160", f"generator.n_samples_per_prompt={N}",
                f"generator.eval_n_samples_per_prompt={EVAL_N}", "trainer.train_batch_size=4",
                "trainer.policy_mini_batch_size=4", "trainer.max_training_steps=1", "trainer.eval_before_train=false",
                "trainer.logger=jsonl", "trainer.progress=false", "trainer.print_example_interval=0", *overrides,
            ],
            announce=lambda line: None,
        )  # fmt: skip
        BasePPOExp(cfg, plugin).run()
        log = cfg.trainer.log_folder / "metrics.jsonl"
        return {name for line in log.read_text().splitlines() for name in json.loads(line)}

    return run


def test_four_runs_emit_every_listed_name_and_none_of_the_others(names) -> None:
    emitted = names(
        "trainer.run_name=reward", f"{A}.use_kl_loss=false", f"{A}.use_kl_in_reward=true",
        f"{A}.zero_variance_filter=true", "trainer.eval_interval=1", "trainer.ckpt_interval=1",
        "trainer.hf_save_interval=1",
    )  # fmt: skip
    off = ("trainer.eval_interval=0", "trainer.ckpt_interval=0", "trainer.hf_save_interval=0")
    emitted |= names("trainer.run_name=loss", f"{A}.use_kl_loss=true", *off)
    emitted |= names("trainer.run_name=anchor", f"{A}.use_kl_loss=false", f"{A}.policy_loss_type=rollout_is", *off)
    critic = (f"{A}.advantage_estimator=gae", f"trainer.critic.model.path={QUICKSTART / 'tiny_model'}")
    sizes = ("trainer.critic_mini_batch_size=4", f"{A}.use_kl_loss=false")
    emitted |= names("trainer.run_name=critic", *critic, *sizes, *off)
    assert expected() - emitted == set()
    absent = listed("Not emitted")
    assert [name for name in emitted if any(fnmatch.fnmatchcase(name, pattern) for pattern in absent)] == []
