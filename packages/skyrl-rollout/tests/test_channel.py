"""Urls and credentials: which forms are dialled and which are refused, and how a connection that went silent ends."""

import os
import signal

import grpc.aio
import pytest
from skyrl_rollout import channel
from skyrl_rollout.channel import open_channel, parse_url
from skyrl_rollout.errors import ProtocolMismatch
from skyrl_rollout.protocol import check_server
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.security import Credentials
from skyrl_rollout.v1 import control_pb2, control_pb2_grpc


@pytest.mark.parametrize(
    ("url", "target", "local"),
    [
        ("grpc://localhost:50051", "localhost:50051", True),
        ("grpc://127.0.0.2:1", "127.0.0.2:1", True),
        ("grpcs://gpu-7.example:443", "gpu-7.example:443", False),
        ("grpc://[::1]:50051", "[::1]:50051", True),
        ("unix:///run/rollout.sock", "unix:/run/rollout.sock", True),
    ],
)
def test_the_three_forms_of_a_url_are_dialled(url, target, local):
    endpoint = parse_url(url)
    assert (endpoint.target, endpoint.is_local) == (target, local)


def test_an_http_url_is_refused_with_the_grpc_form():
    with pytest.raises(ValueError, match=r"write grpc://10.0.0.1:8000$"):
        parse_url("http://10.0.0.1:8000/v1")
    with pytest.raises(ValueError, match=r"write grpcs://host:8000$"):
        parse_url("https://host:8000")


@pytest.mark.parametrize(
    "url", ["", "host:1", "grpc://host", "grpc://host:0", "grpc://host:70000", "unix:", "tcp://h:1"]
)
def test_anything_else_is_refused_with_the_forms_that_exist(url):
    with pytest.raises(ValueError, match="grpc://host:port, grpcs://host:port or unix:///"):
        parse_url(url)


async def test_a_connection_that_went_silent_ends_the_call_that_waits_on_it(monkeypatch):
    monkeypatch.setattr(channel, "KEEPALIVE_TIMEOUT_MS", 500)
    with ReferenceServer() as server:
        async with open_channel(server.url, keepalive_interval_ms=500) as opened:
            hourly = control_pb2.WatchStatusRequest(interval={"seconds": 3600})
            watch = control_pb2_grpc.EngineServiceStub(opened).WatchStatus(hourly, timeout=30)
            await watch.read()
            os.kill(server.pid, signal.SIGSTOP)
            try:
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await watch.read()
            finally:
                os.kill(server.pid, signal.SIGCONT)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_token_does_not_cross_a_network_in_clear_text():
    with pytest.raises(ValueError, match="use grpcs://"):
        open_channel("grpc://10.0.0.1:50051", Credentials(token="secret"))


def test_credentials_are_read_from_files_and_do_not_print_their_secret(tmp_path):
    (tmp_path / "token").write_text("s3cret\n")
    credentials = Credentials.from_files(token=tmp_path / "token")
    assert credentials.metadata() == (("authorization", "Bearer s3cret"),)
    assert "s3cret" not in repr(credentials)
    with pytest.raises(ValueError, match="both certificate_chain and private_key"):
        Credentials(certificate_chain=b"pem")
    with pytest.raises(ValueError, match="bearer token"):
        Credentials(token="two words\n")


def test_a_server_that_is_too_old_is_refused_with_both_versions():
    check_server(5, "newer 2.0", "grpc://h:1")
    with pytest.raises(ProtocolMismatch, match=r"grpc://h:1 speaks protocol 1\.2 \(engine 0\.1\).*needs 1\.4: upgrade"):
        check_server(2, "engine 0.1", "grpc://h:1", needed_minor=4)
