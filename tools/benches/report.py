"""What a bench found: figures with unit and bound, and on which machine, when and with which versions."""

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("skyrl-rollout", "skyrl-arctic-inference", "grpcio", "protobuf", "numpy")


@dataclass(frozen=True)
class Figure:
    """One measured value. at_least, at_most: its bound; None: it has none."""

    name: str
    value: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None

    @property
    def holds(self) -> bool:
        return (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )

    @property
    def bound(self) -> str:
        """The bound as it is read, "" without one."""
        if self.at_least is not None:
            return f"at least {self.at_least:g}"
        return "" if self.at_most is None else f"at most {self.at_most:g}"


@dataclass(frozen=True)
class Report:
    """All figures of one run. judged: whether the bounds count, which they do at full size only. settings: what was
    measured, name -> value. versions: beside those of this environment, as `versions_here` gives them. cases: the same
    numbers by what was measured, for benches that have a row per case."""

    bench: str
    figures: Sequence[Figure]
    settings: Mapping[str, object]
    judged: bool
    versions: Mapping[str, str]
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    machine: str = field(default_factory=lambda: machine())
    cases: Sequence[Mapping[str, object]] = ()

    @property
    def holds(self) -> bool:
        return not self.judged or all(figure.holds for figure in self.figures)

    def as_dict(self) -> dict[str, object]:
        """The same as plain values; `holds` of a figure is None where nothing is judged."""
        figures = [
            asdict(f) | {"holds": f.holds if self.judged and f.bound else None} for f in self.figures
        ]  # fmt: skip
        return ({"cases": [dict(case) for case in self.cases]} if self.cases else {}) | {
            "bench": self.bench,
            "date": self.date,
            "machine": self.machine,
            "versions": dict(self.versions),
            "settings": dict(self.settings),
            "figures": figures,
            "judged": self.judged,
            "holds": self.holds,
        }


def table(report: Report) -> str:
    """The report as lines of text."""
    width = max(len(f.name) for f in report.figures)
    lines = [
        f"{report.bench}, {report.date}, {report.machine}",
        ", ".join(f"{name} {value}" for name, value in report.versions.items()),
        ", ".join(f"{name} {value}" for name, value in report.settings.items()),
        "",
    ]
    for f in report.figures:
        verdict = "" if not f.bound else f"{f.bound}: {'holds' if f.holds else 'DOES NOT HOLD'}"
        if not report.judged and f.bound:
            verdict = f"{f.bound}: not judged in small"
        lines.append(f"{f.name:<{width}}  {f.value:>12,.4g} {f.unit:<10} {verdict}".rstrip())
    return "\n".join(lines)


def recorded(page: str, report: Report) -> str:
    """The page with this report as the first ```text block below the heading `## BENCH`. ValueError without one."""
    heading = f"## {report.bench}\n"
    before, found, rest = page.partition(heading)
    if not found or "```text\n" not in rest.split("\n## ")[0]:
        raise ValueError(f"the page has no heading {heading.strip()!r} with a ```text block below it")
    lead, _, rest = rest.partition("```text\n")
    _, _, tail = rest.partition("```\n")
    return f"{before}{found}{lead}```text\n{table(report)}\n```\n{tail}"


def machine() -> str:
    """The cores that this process may use, their model, the memory, and how busy the machine is already."""
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            cpu = value.strip()
            break
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    load = os.getloadavg()[0]
    return f"{len(os.sched_getaffinity(0))} cores of {cpu}, {memory_gib:.0f} GiB, load {load:.1f}"


def versions_here() -> dict[str, str]:
    """Python and the packages of this environment that matter here."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, smallest, largest)."""
    return statistics.median(values), min(values), max(values)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]
