"""What `skyrl-rollout probe`, `generate` and `score` print, and what they say of an endpoint that is not one."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from skyrl_rollout.cli import main
from skyrl_rollout.reference.process import ReferenceServer

TOLD_WITHIN_S = 10.0


@pytest.fixture(scope="module")
def server() -> Iterator[ReferenceServer]:
    with ReferenceServer() as running:
        yield running


def test_probe_shows_who_answers_and_how_it_is_doing(
    server: ReferenceServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", server.url]) == 0
    shown = capsys.readouterr().out
    assert server.ready["instance"] in shown
    for said in (
        "protocol 1.",
        "vocabulary 64, context 4096",
        "base 0",
        "serving",
        "4096 requests",
        "logprob_modes (raw",
    ):
        assert said in shown
    assert "delta" in next(line for line in shown.splitlines() if line.startswith("lacks"))


def test_probe_answers_programs_in_json(server: ReferenceServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", server.url, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["healthy"], said["status"]["state"], said["model"]["tensors"]) == (True, "serving", 3)
    assert said["capabilities"]["transports"] == ["inline", "shm"]


def test_generate_prints_ids_and_logprobs_that_repeat_with_the_seed(
    server: ReferenceServer, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["generate", server.url, "--tokens", "1,2,3", "--max-tokens", "5", "--seed", "7", "--ignore-eos"]
    assert main(given) == main(given) == 0
    first, second = (text.split("\n") for text in capsys.readouterr().out.split(" s\n")[:2])
    assert first[:-1] == second[:-1]
    assert first[0].startswith("started    version 0, logprobs raw, seed 7, at most 5 tokens")
    assert len(first[1].partition("ids ")[2].split()) == len(first[2].partition("logprobs ")[2].split()) == 5
    assert first[3] == "sample 0   LENGTH after 5 tokens: 0-5 by version 0"


def test_generate_answers_programs_event_by_event(server: ReferenceServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", server.url, "--tokens", "1 2", "--samples", "2", "--temperature", "0", "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    made = {event["sample"]: event["num_tokens"] for event in events if event["event"] == "finished"}
    assert events[0]["event"] == "started" and sorted(made) == [0, 1]
    deltas = [event for event in events if event["event"] == "delta"]
    assert sum(len(event["token_ids"]) for event in deltas) == sum(made.values())


def test_score_prints_a_logprob_for_each_place(server: ReferenceServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", server.url, "--tokens", "1,2,3,4", "--from", "2", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["token_ids"] == [3, 4] and len(said["logprobs"]) == 2 and said["weight_version"] == 0


def test_a_refusal_of_the_server_is_one_line(server: ReferenceServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", server.url, "--tokens", "1,999"]) == 1
    assert capsys.readouterr().err == "error: prompt_token_ids must lie in [0, 64), the model's vocabulary\n"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:1", "write grpc://127.0.0.1:1"),
        ("127.0.0.1:1", "write grpc://host:port"),
        ("grpc://", "write"),
    ],
)
@pytest.mark.parametrize("command", [["probe"], ["generate", "--tokens", "1"], ["score", "--tokens", "1,2"]])
def test_a_wrong_url_is_told_at_once(
    command: list[str], url: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command[0], url, *command[1:]]) == 2
    assert said in capsys.readouterr().err


def test_a_token_file_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "token"
    assert main(["probe", "grpc://127.0.0.1:1", "--token-file", str(missing)]) == 2
    assert str(missing) in capsys.readouterr().err


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["nobody", "silent"])
def test_an_endpoint_that_is_no_rollout_server_is_told_within_ten_seconds(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if kind == "silent":
            listener.listen()
        url = f"grpc://127.0.0.1:{listener.getsockname()[1]}"
        began = time.monotonic()
        assert main(["probe", url]) == 1
        assert time.monotonic() - began < TOLD_WITHIN_S
    assert f"no rollout server answers at {url}" in capsys.readouterr().err
