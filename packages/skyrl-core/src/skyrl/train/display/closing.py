"""What a run leaves on the screen at its end: a table of steps, the reward curve and where its files are."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

MAX_ROWS = 20
BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class StepRow:
    """One line of the closing table. `pass_at_n` is the share of prompts with any reward above 0."""

    step: int
    pass_at_n: float
    raw_reward: float
    seconds: float


def shown(rows: Sequence[StepRow]) -> list[StepRow]:
    """At most MAX_ROWS rows, evenly spaced, the first and the last among them."""
    if len(rows) <= MAX_ROWS:
        return list(rows)
    picks = {round(i * (len(rows) - 1) / (MAX_ROWS - 1)) for i in range(MAX_ROWS)}
    return [rows[i] for i in sorted(picks)]


def closing_table(rows: Sequence[StepRow], n_samples: int) -> Table:
    """The table that a run ends with: step, pass rate over the samples of a prompt, raw reward, seconds."""
    table = Table(title=None)
    for column in ("Step", f"avg_pass@{n_samples}", "avg_raw_reward", "sec/it"):
        table.add_column(column, justify="right")
    for r in shown(rows):
        table.add_row(str(r.step), f"{r.pass_at_n:.4f}", f"{r.raw_reward:.4f}", f"{r.seconds:.2f}")
    return table


def spark_line(values: Sequence[float], width: int = 50) -> str:
    """The values as one row of block characters, each the mean of an equal share, scaled from 0 (or the least) up."""
    if not values:
        return ""
    width = min(width, len(values))
    cuts = [round(i * len(values) / width) for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
    low, high = min(0.0, *means), max(means)
    span = (high - low) or 1.0
    return "".join(BARS[round((m - low) / span * (len(BARS) - 1))] for m in means)


def save_reward_curve(rows: Sequence[StepRow], path: Path) -> None:
    """A PNG of the mean raw reward by step, with its ten-step mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps, rewards = [r.step for r in rows], [r.raw_reward for r in rows]
    smooth = [sum(w) / len(w) for w in (rewards[max(0, i - 9) : i + 1] for i in range(len(rewards)))]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    axes.plot(steps, rewards, color="0.7", linewidth=1, label="mean raw reward of the step")
    axes.plot(steps, smooth, color="C0", linewidth=2, label="mean of the last 10 steps")
    axes.set(xlabel="training step", ylabel="mean raw reward", ylim=(min(0.0, *rewards), max(1.0, *rewards) * 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def print_closing(rows: Sequence[StepRow], *, n_samples: int, files: dict[str, Path], last_step: int) -> None:
    """The table, the curve as text, the last step under its metric name, and every file worth opening."""
    console = Console()
    console.print(closing_table(rows, n_samples))
    if rows:
        rewards = [r.raw_reward for r in rows]
        console.print(
            f"reward {spark_line(rewards)} {rewards[0]:.3f} -> {rewards[-1]:.3f}", markup=False, highlight=False
        )
    print(f"trainer/global_step: {last_step}")
    for name, path in files.items():
        print(f"{name}: {path}")


def print_metrics(metrics: Mapping[str, float], files: Mapping[str, Path]) -> None:
    """Every figure under its name, and every file worth opening."""
    for name, value in sorted(metrics.items()):
        print(f"{name}: {value:.6g}")
    for name, path in files.items():
        print(f"{name}: {path}")
