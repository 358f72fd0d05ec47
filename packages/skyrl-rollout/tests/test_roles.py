"""Who may call what: tokens and client certificates, their roles, and what happens when the files change."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from made_certificates import Authority, Pair
from raw_calls import RawCalls, refused
from skyrl_rollout.channel import open_channel
from skyrl_rollout.cli import main
from skyrl_rollout.client import RolloutClient
from skyrl_rollout.errors import PermissionDenied, RolloutError, Unauthenticated
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.security import ENVIRONMENT, Credentials
from skyrl_rollout.server.auth import NEEDED_ROLE, ROLES, Role
from skyrl_rollout.server.options import ROLE_NAMES
from skyrl_rollout.tokens import LogprobMode, Sampling
from skyrl_rollout.v1 import control_pb2, generation_pb2, weights_pb2

REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
MESSAGES = (control_pb2, generation_pb2, weights_pb2)


def secret(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.touch(mode=0o600)
    path.write_text(text + "\n")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("secrets")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ReferenceServer]:
    agent, trainer = secret(folder, "agent", "a-token-of-agents"), secret(folder, "trainer", "a-token-of-trainers")
    with ReferenceServer("--token-file", f"rollout={agent}", "--token-file", f"control={trainer}") as process:
        yield process


@pytest.fixture
async def agent(server: ReferenceServer, folder: Path) -> AsyncIterator[RolloutClient]:
    shown = Credentials.from_files(token=folder / "agent")
    async with await RolloutClient.connect(server.url, credentials=shown) as client:
        yield client


def methods() -> list[tuple[str, bool]]:
    """(full name, whether the caller streams) of everything in the protocol."""
    services = itertools.chain.from_iterable(m.DESCRIPTOR.services_by_name.values() for m in MESSAGES)
    return [(f"/{s.full_name}/{m.name}", m.client_streaming) for s in services for m in s.methods]


def test_every_method_of_the_protocol_stands_in_the_table() -> None:
    ours = {name for name in NEEDED_ROLE if name.startswith("/skyrl_rollout.")}
    assert ours == {name for name, _ in methods()}
    assert tuple(ROLES) == ROLE_NAMES


@pytest.mark.parametrize("shown", ["", "Bearer wrong", "Bearer ", "a-token-of-agents", "Basic a-token-of-agents"])
async def test_no_method_answers_without_the_right_token(server: ReferenceServer, shown: str) -> None:
    metadata = (("authorization", shown),) if shown else ()
    async with open_channel(server.url, Credentials()) as channel:
        for name, streams in methods():
            error = await refused(raw(channel, name, b"", metadata, streams=streams))
            assert (error.code, error.reason) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"), name
        health = await refused(RawCalls(channel).health.Check(health_pb2.HealthCheckRequest(), timeout=5))
        assert health.code is grpc.StatusCode.UNAUTHENTICATED
        assert (await refused(raw(channel, REFLECTION, b"", metadata, streams=True))).reason == "UNAUTHENTICATED"


async def test_the_role_rollout_generates_and_controls_nothing(server: ReferenceServer, agent: RolloutClient) -> None:
    answer = await agent.generate([1, 2], Sampling(max_tokens=4, ignore_eos=True), mode=LogprobMode.RAW, timeout_s=10)
    assert len(answer.samples[0].token_ids) == 4
    assert await agent.health()
    assert (await agent.status()).state == "serving"
    async with open_channel(server.url, Credentials()) as channel:
        for name, streams in methods():
            if NEEDED_ROLE[name] is Role.CONTROL:
                error = await refused(raw(channel, name, b"", bearer("a-token-of-agents"), streams=streams))
                assert (error.code, error.reason) == (grpc.StatusCode.PERMISSION_DENIED, "ROLE"), name
                assert error.details["role_needed"] == "control"
    with pytest.raises(PermissionDenied, match="needs the role control, this credential has rollout"):
        await agent.acquire_control("agent")


async def test_the_role_control_may_do_everything(server: ReferenceServer, folder: Path) -> None:
    shown = Credentials.from_files(token=folder / "trainer")
    async with await RolloutClient.connect(server.url, credentials=shown) as client:
        await client.generate([1, 2], Sampling(max_tokens=4, ignore_eos=True), mode=LogprobMode.RAW, timeout_s=10)
        epoch = await client.acquire_control("trainer")
        assert await client.resume(epoch, await client.pause(epoch, "keep")) == 0


async def test_what_the_environment_names_is_shown(
    server: ReferenceServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Unauthenticated, match="needs a credential"):
        await RolloutClient.connect(server.url)
    monkeypatch.setenv(ENVIRONMENT["token"], str(folder / "agent"))
    async with await RolloutClient.connect(server.url) as client:
        assert await client.health()
    monkeypatch.setenv(ENVIRONMENT["token"], str(folder / "nowhere"))
    with pytest.raises(ValueError, match=r"SKYRL_ROLLOUT_TOKEN_FILE=.*nowhere: No such file"):
        await RolloutClient.connect(server.url)


async def test_a_replaced_token_counts_from_the_next_call_on_both_sides(folder: Path, tmp_path: Path) -> None:
    served, own = secret(tmp_path, "served", "the-first-token"), secret(tmp_path, "own", "the-first-token")
    with ReferenceServer("--token-file", f"control={served}") as process:
        async with await RolloutClient.connect(process.url, credentials=Credentials.from_files(token=own)) as client:
            served.write_text("the-second-token")
            with pytest.raises(Unauthenticated):
                await client.health()
            own.write_text("the-second-token")
            assert await client.health()
            served.write_text("")  # whoever writes it is half way: the last one stays valid
            assert await client.health()
            own.unlink()
            assert await client.health()
            served.write_text("the-third-token")
            served.chmod(0o644)
            assert await client.health()
        process.stop()
        assert "open to every user" in process.last_lines()
        assert "-token" not in process.last_lines().replace("--token-file", "")


@pytest.mark.parametrize(
    ("mode", "text", "said"),
    [
        (0o644, "x", "chmod 600"),
        (0o600, "", "one line of 1"),
        (0o600, "two\nlines", "one line"),
        (0o600, None, "No such file"),
    ],
)
def test_a_token_file_that_cannot_be_used_is_refused_at_the_start(
    mode: int, text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "token"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    assert main(["reference", "--listen", "127.0.0.1:0", "--token-file", f"control={path}"]) == 2
    line = capsys.readouterr().err
    assert said in line and str(path) in line and line.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--token-file", "root=/t"), "'root' is no role, expected one of rollout, control"),
        (("--tls-client-ca", "/ca"), "--tls-client-ca needs --tls-certificate"),
        (("--client-role", "a=control"), "--client-role needs --tls-client-ca"),
        (("--tls-certificate", "/no.pem", "--tls-key", "/no.key"), "--tls-certificate /no.pem: there is no such file"),
    ],
)
def test_flags_that_do_not_fit_are_refused_in_one_line(
    flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reference", "--listen", "127.0.0.1:0", *flags]) == 2
    line = capsys.readouterr().err
    assert said in line and line.count("\n") == 1


# Certificates


async def test_a_client_certificate_gives_the_role_of_its_name(tmp_path: Path) -> None:
    ours, others = Authority(tmp_path / "ours"), Authority(tmp_path / "others")
    pair = ours.sign("server")
    trainer, agent, nobody, stranger = (a.sign(n) for a, n in zip((ours, ours, ours, others), NAMES, strict=True))
    roles = ("--client-role", "trainer=control", "--client-role", "agent=rollout")
    with ReferenceServer(*tls(pair), "--tls-client-ca", str(ours.ca), *roles) as process:
        assert process.url.startswith("grpcs://")
        async with await RolloutClient.connect(process.url, credentials=shows(ours, trainer)) as client:
            assert await client.acquire_control("trainer") > 0
        async with await RolloutClient.connect(process.url, credentials=shows(ours, agent)) as client:
            assert await client.health()
            with pytest.raises(PermissionDenied, match="needs the role control"):
                await client.acquire_control("agent")
        with pytest.raises(PermissionDenied, match="certificate of nobody has no role here"):
            await RolloutClient.connect(process.url, credentials=shows(ours, nobody))
        for shown in (shows(ours, stranger), Credentials.from_files(roots=ours.ca), shows(others, trainer)):
            with pytest.raises(RolloutError, match=r"handshake|certificate|SSL|unavailable|Socket closed|recvmsg"):
                await RolloutClient.connect(process.url, credentials=shown, timeout_s=0.4)


async def test_certificates_are_replaced_on_both_sides_without_a_restart(tmp_path: Path) -> None:
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    served, own = tmp_path / "served", tmp_path / "own"
    install(served, old, "server")
    install(own, old, "trainer")
    flags = ("--tls-certificate", served / "crt", "--tls-key", served / "key", "--tls-client-ca", served / "ca")
    with ReferenceServer(*map(str, flags), "--token-delay-ms", "5") as process:
        shown = Credentials.from_files(roots=own / "ca", certificate=own / "crt", private_key=own / "key")
        async with await RolloutClient.connect(process.url, credentials=shown) as client:
            began = asyncio.Event()
            running = asyncio.create_task(
                client.generate(
                    [1], Sampling(max_tokens=200, ignore_eos=True), mode=LogprobMode.RAW, timeout_s=20,
                    on_progress=lambda _: began.set(),
                )
            )  # fmt: skip
            await began.wait()
            install(served, new, "server")
            assert await client.health(), "the connection that is open goes on"
            with pytest.raises(RolloutError):
                await RolloutClient.connect(process.url, credentials=shown.read_again(), timeout_s=0.4)
            (own / "crt").write_bytes(b"half a certif")
            assert await client.health(), "files that cannot be used yet change nothing"
            install(own, new, "trainer")
            assert await client.health(), "a new connection, under the new certificates"
            assert len((await running).samples[0].token_ids) == 200
        (served / "key").write_bytes(b"half a key")
        async with await RolloutClient.connect(process.url, credentials=shown.read_again()) as client:
            assert await client.health(), "the server keeps the last pair that fits"
        process.stop()
        assert "not taken yet" in process.last_lines()


async def test_certificates_alone_without_roles_give_control(tmp_path: Path) -> None:
    ours = Authority(tmp_path)
    with ReferenceServer(*tls(ours.sign("server")), "--tls-client-ca", str(ours.ca)) as process:
        async with await RolloutClient.connect(process.url, credentials=shows(ours, ours.sign("any"))) as client:
            assert await client.acquire_control("any") > 0


async def test_a_public_address_needs_tls_and_has_no_reflection(tmp_path: Path) -> None:
    ours = Authority(tmp_path)
    token = secret(tmp_path, "token", "a-token-over-tls")
    flags = (*tls(ours.sign("server")), "--token-file", f"control={token}")
    with ReferenceServer(*flags, listen="0.0.0.0:0") as process:
        url = process.url.replace("0.0.0.0", "127.0.0.1")
        shown = Credentials.from_files(roots=ours.ca, token=token)
        async with await RolloutClient.connect(url, credentials=shown) as client:
            answer = await client.generate(
                [1], Sampling(max_tokens=3, ignore_eos=True), mode=LogprobMode.RAW, timeout_s=10
            )
            assert len(answer.samples[0].token_ids) == 3
        async with open_channel(url, shown) as channel:
            error = await refused(raw(channel, REFLECTION, b"", shown.metadata(), streams=True))
            assert error.code is grpc.StatusCode.UNIMPLEMENTED


NAMES = ("trainer", "agent", "nobody", "stranger")


def tls(pair: Pair) -> tuple[str, ...]:
    return ("--tls-certificate", str(pair.certificate), "--tls-key", str(pair.key))


def shows(trusted: Authority, pair: Pair) -> Credentials:
    return Credentials.from_files(roots=trusted.ca, certificate=pair.certificate, private_key=pair.key)


def install(folder: Path, authority: Authority, name: str) -> None:
    folder.mkdir(exist_ok=True)
    pair = authority.sign(name)
    for target, source in (("key", pair.key), ("crt", pair.certificate), ("ca", authority.ca)):
        (folder / target).write_bytes(source.read_bytes())


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


async def raw(channel, name: str, request: bytes, metadata, *, streams: bool) -> None:
    """Any method, its answer unread: what is refused is refused before its shape matters."""
    make = channel.stream_stream if streams else channel.unary_stream
    await drained(make(name)(iter(()) if streams else request, timeout=5, metadata=metadata))


async def drained(call) -> None:
    async for _ in call:
        pass
