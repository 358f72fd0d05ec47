"""Does the conformance suite pass a server that keeps the protocol, and catch one that does not?"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from skyrl_rollout.conformance import ITEMS, Item, Outcome, Plan, connected, run
from skyrl_rollout.conformance.compatibility import table, with_table
from skyrl_rollout.conformance.expected import EXPECTED, unexpected
from skyrl_rollout.conformance.item import FAILED, NOT_OFFERED, NOT_RUN, PASSED
from skyrl_rollout.conformance.launching import Launcher
from skyrl_rollout.conformance.table import BY_NUMBER
from skyrl_rollout.reference.process import ReferenceServer, ServedProcess

HERE = Path(__file__).parent
COMPATIBILITY = HERE.parent / "COMPATIBILITY.md"
TINY_MODEL = HERE.parents[1] / "skyrl-core/src/skyrl/train/quickstart/tiny_model"
REFERENCE = f"{sys.executable} -m skyrl_rollout.cli reference --listen {{listen}} --logits canary --delta"
CAUGHT = {
    "answers_raw_for_temperature": (4, "log_softmax(logits / T)"),
    "zeroes_unknown_logprobs": (3, "expected NaN"),
    "keeps_the_old_weights": (34, "the output is the same"),
    "cuts_where_the_reader_is": (24, "the weights changed after"),
    "takes_any_bytes": (36, "SealUpdate after a flipped bit succeeded"),
    "falls_back_to_the_base": (45, "succeeded, expected NOT_FOUND"),
    "takes_one_id_twice": (8, "one id"),
    "defaults_to_sixteen_tokens": (6, "before 20 tokens"),
    "refuses_with_a_wrong_code": (9, "INVALID_ARGUMENT"),
}


async def outcomes_of(plan: Plan, *numbers: int) -> dict[int, Outcome]:
    async with connected(plan) as target:
        return {o.item.number: o for o in await run(target, [BY_NUMBER[n] for n in numbers])}


def test_the_table_holds_every_item_of_the_specification_once() -> None:
    assert [item.number for item in ITEMS] == list(range(1, 55))
    assert len({item.title for item in ITEMS}) == len({item.check for item in ITEMS}) == 54
    assert {item.number for item in ITEMS if item.engine} == {4, 25, 35}


@pytest.mark.ci
async def test_the_reference_server_passes_all_fifty_four() -> None:
    plan = Plan(launcher=Launcher(f"{REFERENCE} --model {{model}}", model=TINY_MODEL), model=TINY_MODEL)
    async with connected(plan) as target:
        outcomes = await run(target)
    assert unexpected(outcomes, "reference") == []
    assert not EXPECTED["reference"]
    assert len(outcomes) == 54


@pytest.mark.parametrize("lie", CAUGHT)
async def test_a_server_that_breaks_a_promise_is_caught_by_its_item(lie: str) -> None:
    number, said = CAUGHT[lie]
    command = [sys.executable, str(HERE / "lying_server.py"), lie, "--listen", "127.0.0.1:0"]
    with ServedProcess(command) as server:
        found = (await outcomes_of(Plan(server.url), number))[number]
    assert found.status == FAILED
    assert said in found.reason


@pytest.fixture(scope="module")
def plain() -> ReferenceServer:
    """One without deltas, whose launcher, model and credentials are not known."""
    with ReferenceServer("--logits", "canary", "--max-concurrent", "8") as server:
        yield server


async def test_what_is_missing_is_said_and_never_counted_as_passed(plain: ReferenceServer) -> None:
    outcomes = await outcomes_of(Plan(plain.url), 5, 21, 41, 49, 51, 54)
    assert {n: (o.status, o.reason) for n, o in outcomes.items()} == {
        5: (NOT_RUN, "model"),
        21: (PASSED, "8 requests"),
        41: (NOT_OFFERED, "delta"),
        49: (NOT_RUN, "launcher"),
        51: (NOT_RUN, "credentials"),
        54: (NOT_RUN, "launcher"),
    }


async def test_a_check_that_breaks_is_a_failure_that_names_its_exception(plain: ReferenceServer) -> None:
    async def breaks(target: object) -> None:
        raise KeyError("nothing")

    async with connected(Plan(plain.url)) as target:
        [found] = await run(target, [Item(1, "breaks", breaks)])
    assert found.status == FAILED
    assert "KeyError" in found.reason


def test_the_command_prints_a_row_for_each_item_and_the_totals(plain: ReferenceServer) -> None:
    done = command("conformance", plain.url, "--only", "1,2,41,49")
    assert done.returncode == 0
    rows = [line.split()[:2] for line in done.stdout.splitlines()[:-1] if line[:2].strip().isdecimal()]
    assert rows == [["1", "passed"], ["2", "passed"], ["41", "not"], ["49", "not"]]
    assert "capability: delta" in done.stdout and "needs: launcher" in done.stdout
    assert done.stdout.splitlines()[-1] == "2 passed, 1 not run, 1 not offered"


def test_the_command_answers_programs_in_json(plain: ReferenceServer) -> None:
    done = command("conformance", plain.url, "--only", "9,16", "--json")
    said = json.loads(done.stdout)
    assert [(row["number"], row["status"]) for row in said["items"]] == [(9, "passed"), (16, "passed")]
    assert said["totals"] == {"passed": 2, "failed": 0, "not run": 0, "not offered": 0}


def test_the_command_fails_where_an_item_is_not_as_expected(plain: ReferenceServer) -> None:
    done = command("conformance", plain.url, "--only", "1,41", "--expect", "reference")
    assert done.returncode == 1
    assert "item 41 is 'not offered', expected 'passed'" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "nothing to test"),
        (("http://127.0.0.1:1",), "speaks gRPC"),
        (("grpc://127.0.0.1:1", "--only", "55"), "items 1 to 54"),
        (("grpc://127.0.0.1:1",), "grpc://127.0.0.1:1"),
        (("--launcher", "my-server"), "{listen}"),
        (("--launcher", "false --listen {listen}"), "does not answer"),
        (("--launcher", "no-such-command {listen}"), "cannot be started"),
    ],
)
def test_the_command_says_what_it_lacks(arguments: tuple[str, ...], said: str) -> None:
    done = command("conformance", *arguments)
    assert done.returncode != 0
    assert said in done.stderr


def test_the_plugin_runs_each_item_as_a_test_and_skips_what_cannot_run(plain: ReferenceServer) -> None:
    arguments = ["-p", "no:cacheprovider", "-rs", "--rollout-url", plain.url, "-k", "01 or 09 or 41 or 49"]
    pytest_run = [sys.executable, "-m", "pytest", *arguments, "--pyargs", "skyrl_rollout.conformance"]
    done = subprocess.run(pytest_run, capture_output=True, text=True, timeout=60, cwd="/", check=False)
    assert done.returncode == 0, done.stdout
    assert "2 passed, 2 skipped" in done.stdout
    assert "not offered: delta" in done.stdout and "not run: launcher" in done.stdout


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "skyrl_rollout.cli", *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)


def test_the_compatibility_page_carries_the_table_of_today() -> None:
    assert table() in COMPATIBILITY.read_text()
    assert with_table(COMPATIBILITY.read_text()) == COMPATIBILITY.read_text()


def test_the_compatibility_table_has_a_row_for_each_item_and_says_what_is_not_offered() -> None:
    rows = [row.split(" | ") for row in table().splitlines()]
    assert len(rows) == 2 + len(ITEMS) + 1
    assert rows[0][3:] == [f"`{name}`" for name in EXPECTED][:-1] + [f"`{list(EXPECTED)[-1]}` |"]
    slept = next(row for row in rows if row[0] == "| 46")
    assert slept[2:] == ["`sleep`", "passed", "not offered: `sleep`", "not offered: `sleep` |"]
    assert rows[-1][3:] == ["54 passed", "53 passed, 1 not offered", "53 passed, 1 not offered |"]
