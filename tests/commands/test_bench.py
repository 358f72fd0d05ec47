"""Does the bench command measure what it names, judge its bounds only at full size, and print the same as JSON?"""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import bench
import pytest
from benches import weights
from benches.report import Figure, Report, percentile, recorded, table
from benches.vllm_environment import ROOT, SERVER_BINARIES
from benches.worker import Worker

COMMAND = (sys.executable, str(ROOT / "tools/bench.py"))


def report(*figures: Figure, judged: bool = True) -> Report:
    return Report("probe", figures, {}, judged, {})


def measured(name: str) -> dict[str, dict[str, object]]:
    """The figures of a small run, by name."""
    done = subprocess.run(
        (*COMMAND, name, "--small", "--json"), capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["bench"] == name
    assert "cores of" in found["machine"]
    assert found["versions"]["python"] and found["date"]
    assert not found["judged"] and all(figure["holds"] is None for figure in found["figures"])
    assert all(figure["value"] >= 0 for figure in found["figures"])
    return {figure["name"]: figure for figure in found["figures"]}


def test_a_bound_that_does_not_hold_is_seen_in_the_table_the_json_and_the_exit_code() -> None:
    slow, fine = Figure("rate", 0.5, "GB/s", at_least=1.0), Figure("p99", 20.0, "ms", at_most=100.0)
    found = report(slow, fine)
    assert not found.holds and report(fine).holds
    assert "at least 1: DOES NOT HOLD" in table(found) and "at most 100: holds" in table(found)
    figures = json.loads(json.dumps(found.as_dict()))["figures"]
    assert [figure["holds"] for figure in figures] == [False, True]


def test_a_small_run_judges_nothing() -> None:
    found = report(Figure("rate", 0.5, "GB/s", at_least=1.0), judged=False)
    assert found.holds
    assert "not judged in small" in table(found)


def test_a_report_takes_the_place_of_the_last_one_on_its_page() -> None:
    page = "# What\n\n## other\n\n```text\nold\n```\n\n## probe\n\nWords.\n\n```text\nold\n```\n\n## last\n"
    once = recorded(page, report(Figure("rate", 0.5, "GB/s")))
    assert once.startswith("# What\n\n## other\n\n```text\nold\n```\n\n## probe\n\nWords.\n\n```text\nprobe, ")
    assert "GB/s\n```\n\n## last\n" in once and once.count("old") == 1
    assert recorded(once, report(Figure("rate", 0.25, "GB/s"))).count("GB/s") == 1
    with pytest.raises(ValueError, match="no heading '## probe'"):
        recorded("# What\n", report(Figure("rate", 0.5, "GB/s")))


def test_a_percentile_is_one_of_the_values() -> None:
    assert percentile(range(1, 101), 0.99) == 99
    assert percentile([5.0], 0.99) == 5.0
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0


def test_a_name_that_is_not_in_the_table_lists_those_that_are() -> None:
    done = subprocess.run((*COMMAND, "nothing"), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert all(name in done.stderr for name in bench.BENCHES)


def test_a_model_that_is_missing_is_named_with_the_command_that_fetches_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("benches.vllm_environment.SMOLLM2", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"tools/fetch_smollm2\.py"):
        asyncio.run(weights.measure(small=False))


async def test_a_worker_that_ends_before_it_answers_is_an_error_and_not_a_wait() -> None:
    async with Worker("benches.report_of_nothing") as worker:
        with pytest.raises((RuntimeError, ConnectionError)):
            await worker.ask("anything")


@pytest.mark.ci
def test_a_publish_is_measured_whole_and_by_phase() -> None:
    found = measured("weights")
    for transport in ("shm", "inline"):
        for phase in ("look", "copy", "begin", "transfer", "seal", "commit"):
            assert found[f"reference, {transport}: {phase}"]["unit"] == "ms"
    assert found["reference, shm: publish over memcpy"]["at_least"] == 0.12
    assert found["reference, inline: publish"]["at_least"] == 0.25


@pytest.mark.ci
def test_a_prompt_computed_once_is_measured_against_separate_rows_and_the_prediction() -> None:
    found = measured("shared-prefix")
    assert found["64/8/4: measured over predicted"]["at_least"] == 0.9
    assert found["64/8/4: largest difference of a logprob"]["value"] < 1e-5  # type: ignore[operator]
    assert found["64/8/4: peak memory, separate rows"]["unit"] == "MiB"
    assert (
        found["32/512/4: separate rows are chosen"]["value"]
        == found["512/128/1: separate rows are chosen"]["value"]
        == 1
    )


@pytest.mark.ci
def test_streams_are_counted_by_the_servers_while_they_are_open() -> None:
    found = measured("scale")
    for servers in ("1 server", "2 servers"):
        assert 0 < found[f"{servers}: streams open together"]["value"] <= 32
        assert found[f"{servers}: client CPU per finished sample"]["unit"] == "ms"
        assert found[f"{servers}: client memory per open stream"]["unit"] == "kB"


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_the_seam_is_measured_against_vllm_in_its_own_process() -> None:
    if not (SERVER_BINARIES / "arctic-serve").is_file():
        pytest.skip("no server environment: uv run tools/serve.py --sync-only")
    found = measured("seam")
    for way in ("gRPC", "in-process"):
        assert found[f"tiny, {way}"]["unit"] == "tokens/s"
    assert found["tiny, gRPC over in-process"]["at_least"] == 0.9
