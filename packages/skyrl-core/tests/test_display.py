"""What a person sees of a run."""

from pathlib import Path

import pytest
from skyrl.train.display.closing import MAX_ROWS, StepRow, print_closing, save_reward_curve, shown, spark_line
from skyrl.train.display.progress import Progress, clock


def rows(n: int) -> list[StepRow]:
    return [StepRow(i + 1, 0.5, i / n, 1.25) for i in range(n)]


def test_the_line_says_step_reward_speed_eta_and_what_it_waits_for() -> None:
    progress = Progress(10)
    progress.resume_at(0, 10)
    progress.step_done(2, reward=0.5, seconds=3.0)
    progress.waiting_for("rollouts 3/4")
    assert progress.line() == "step 2/10 | reward 0.500 | 3.00 s/it | ETA 0:24 | waiting for rollouts 3/4"


def test_a_long_note_stays_one_line_to_copy_paths_from(capsys: pytest.CaptureFixture[str]) -> None:
    path = "/a/long/folder" * 20
    Progress(10).note(path)
    assert path in capsys.readouterr().out


@pytest.mark.parametrize(("seconds", "text"), [(5, "0:05"), (65, "1:05"), (3725, "1:02:05")])
def test_a_duration_reads_like_a_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_a_long_table_keeps_its_first_and_last_row() -> None:
    picked = shown(rows(100))
    assert len(picked) == MAX_ROWS
    assert (picked[0].step, picked[-1].step) == (1, 100)
    assert [r.step for r in shown(rows(9))] == list(range(1, 10))


def test_the_closing_screen_has_the_public_columns_and_the_last_step(capsys: pytest.CaptureFixture[str]) -> None:
    print_closing(rows(9), n_samples=4, files={"checkpoint": Path("runs/x")}, last_step=9)
    out = capsys.readouterr().out
    for word in ("Step", "avg_pass@4", "avg_raw_reward", "sec/it", "trainer/global_step: 9", "checkpoint: runs/x"):
        assert word in out


def test_the_text_curve_rises_with_the_values() -> None:
    line = spark_line([0.0, 0.5, 1.0])
    assert line[0] < line[1] < line[2]
    assert len(spark_line([0.1] * 500)) == 50
    assert spark_line([]) == ""


def test_the_curve_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "curve" / "reward.png"
    save_reward_curve(rows(30), path)
    assert path.read_bytes().startswith(b"\x89PNG")
