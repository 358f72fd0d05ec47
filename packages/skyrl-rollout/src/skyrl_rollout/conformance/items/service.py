"""Items 50 to 53: health, credentials, reflection and bytes that nobody meant."""

from __future__ import annotations

import asyncio
import pickle
import tempfile
import uuid
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from skyrl_rollout.conformance.item import Failed, NotRun, expect
from skyrl_rollout.conformance.stubs import Stubs, outcome, refused
from skyrl_rollout.conformance.target import Target
from skyrl_rollout.security import Credentials
from skyrl_rollout.v1 import control_pb2, generation_pb2, tensor_pb2, weights_pb2

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
FILES = (tensor_pb2, generation_pb2, control_pb2, weights_pb2)
SERVICES = ("RolloutService", "EngineService", "WeightService")
PACKAGE = "skyrl_rollout.v1"
FUZZED = 20  # messages per method
CALL_S = 2.0
UNCAUGHT = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE)


async def health_follows_state(target: Target) -> None:
    """Item 50."""
    watch = target.stubs.health.Watch(health_pb2.HealthCheckRequest(), timeout=60)
    expect((await told(watch)) == SERVING, "health Watch does not begin with SERVING")
    for name in SERVICES:
        reply = await target.stubs.health.Check(health_pb2.HealthCheckRequest(service=f"{PACKAGE}.{name}"))
        expect(reply.status == SERVING, f"health of {name} is {reply.status}, expected SERVING")
    unknown = target.stubs.health.Check(health_pb2.HealthCheckRequest(service="no.such.Service"))
    await refused(unknown, grpc.StatusCode.NOT_FOUND, what="health Check of an unknown service")
    trainer = await target.trainer()
    modes = list(target.info.capabilities.pause_modes)
    if modes:
        pause = await trainer.pause(modes[0], admission=control_pb2.ADMISSION_QUEUE)
        reply = await target.stubs.health.Check(health_pb2.HealthCheckRequest())
        expect(reply.status == SERVING, "health is not SERVING while paused with a queue")
        await trainer.resume(pause.pause_id)
        pause = await trainer.pause(modes[0], admission=control_pb2.ADMISSION_REJECT)
        expect((await told(watch)) == NOT_SERVING, "health Watch does not say NOT_SERVING while new work is rejected")
        await trainer.resume(pause.pause_id)
        expect((await told(watch)) == SERVING, "health Watch does not say SERVING after Resume")
    if target.offers("sleep"):
        engine = target.stubs.engine
        level = control_pb2.SleepRequest.LEVEL_OFFLOAD
        asleep = await outcome(engine.Sleep(control_pb2.SleepRequest(fence=trainer.fence(), level=level), timeout=60))
        if asleep is None:
            expect((await told(watch)) == NOT_SERVING, "health Watch does not say NOT_SERVING while asleep")
            await engine.WakeUp(control_pb2.WakeUpRequest(fence=trainer.fence()), timeout=60)
            expect((await told(watch)) == SERVING, "health Watch does not say SERVING after WakeUp")
    expect(not watch.done(), "health Watch ended by itself")
    watch.cancel()


async def told(watch: Any) -> int:
    """The next status of a health Watch. Raises Failed where none comes."""
    try:
        async with asyncio.timeout(5):
            reply = await watch.read()
    except TimeoutError:
        raise Failed("health Watch says nothing within 5 s after the state changed") from None
    expect(reply is not grpc.aio.EOF, "health Watch ended")
    return int(reply.status)


async def credentials_are_checked(target: Target) -> None:
    """Item 51."""
    if target.credentials.token is None or target.rollout_token is None:
        raise NotRun("credentials")
    unauthenticated, denied = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED
    roots = target.credentials.root_certificates
    for token, what in ((None, "no credential"), ("not-" + uuid.uuid4().hex, "a wrong credential")):
        async with Stubs(target.url, Credentials(token, roots)) as stubs:
            await refused(stubs.engine.GetServerInfo(control_pb2.GetServerInfoRequest()), unauthenticated, what=what)
            await refused(stubs.rollout.Generate(target.ask(2)), unauthenticated, what=what)
            get = weights_pb2.GetUpdateRequest(update_id="x")
            await refused(stubs.weights.GetUpdate(get), unauthenticated, what=what)
    async with Stubs(target.url, Credentials(target.rollout_token, roots)) as agent:
        error = await outcome(agent.rollout.Generate(target.ask(2)))
        expect(error is None, f"the rollout role cannot generate: {error.message if error else ''}")
        trainer = await target.trainer()
        begin = weights_pb2.BeginUpdateRequest(fence=trainer.fence(), update_id="x")
        pause = control_pb2.PauseRequest(fence=trainer.fence(), mode=control_pb2.PAUSE_MODE_KEEP)
        for call, what in (
            (agent.weights.BeginUpdate(begin), "BeginUpdate by the rollout role"),
            (agent.weights.GetUpdate(weights_pb2.GetUpdateRequest(update_id="x")), "GetUpdate by the rollout role"),
            (agent.engine.Pause(pause), "Pause by the rollout role"),
            (
                agent.engine.AcquireControl(control_pb2.AcquireControlRequest(owner="agent")),
                "AcquireControl by the rollout role",
            ),
        ):
            await refused(call, denied, what=what)
        await agent.info()


async def descriptions_are_whole(target: Target) -> None:
    """Item 52. Reflection must tell all that this build's protocol has: fields may be added, none changed."""
    served = await described(target)
    listed = {f"{f.package}.{s.name}" for f in served.values() for s in f.service}
    for name in SERVICES:
        expect(f"{PACKAGE}.{name}" in listed, f"reflection does not describe {PACKAGE}.{name}")
    theirs = shape(served.values())
    for name, what in shape(own_files()).items():
        expect(name in theirs, f"the server's description lacks {name}")
        expect(theirs[name] == what, f"{name} is {theirs[name]} at the server and {what} in v1: a breaking change")


def own_files() -> list[descriptor_pb2.FileDescriptorProto]:
    """The protocol of this build."""
    files = []
    for module in FILES:
        file = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(file)
        files.append(file)
    return files


async def described(target: Target) -> dict[str, descriptor_pb2.FileDescriptorProto]:
    """File name -> descriptor, of every service and of what those need."""
    wanted = [reflection_pb2.ServerReflectionRequest(file_containing_symbol=f"{PACKAGE}.{s}") for s in SERVICES]
    files: dict[str, descriptor_pb2.FileDescriptorProto] = {}
    while wanted:
        call = target.stubs.reflection.ServerReflectionInfo(iter([wanted.pop()]))
        try:
            async for reply in call:
                for data in reply.file_descriptor_response.file_descriptor_proto:
                    file = descriptor_pb2.FileDescriptorProto.FromString(data)
                    files[file.name] = file
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise NotRun("a server with reflection, which is due on loopback only") from None
            raise
        missing = {d for f in files.values() if f.package == PACKAGE for d in f.dependency} - set(files)
        wanted += [
            reflection_pb2.ServerReflectionRequest(file_by_filename=name)
            for name in missing
            if name.startswith(PACKAGE.replace(".", "/"))
        ][: 0 if wanted else None]
    return files


def shape(files: Any) -> dict[str, str]:
    """Name -> number and type of every field, enum value and RPC."""
    out: dict[str, str] = {}

    def add(prefix: str, message: descriptor_pb2.DescriptorProto) -> None:
        for f in message.field:
            out[f"{prefix}.{f.name}"] = f"field {f.number}, label {f.label}, type {f.type} {f.type_name}"
        for nested in message.nested_type:
            add(f"{prefix}.{nested.name}", nested)
        for enum in message.enum_type:
            out.update({f"{prefix}.{enum.name}.{v.name}": f"value {v.number}" for v in enum.value})

    for file in files:
        if file.package != PACKAGE:
            continue
        for message in file.message_type:
            add(f"{file.package}.{message.name}", message)
        for enum in file.enum_type:
            out.update({f"{file.package}.{enum.name}.{v.name}": f"value {v.number}" for v in enum.value})
        for service in file.service:
            for m in service.method:
                streams = f"{m.client_streaming} {m.server_streaming}"
                out[f"{service.name}.{m.name}"] = f"{m.input_type} -> {m.output_type}, streams {streams}"
    return out


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.mkdir, (self.path,))


async def fuzzed_bytes_crash_nothing(target: Target) -> str:
    """Item 53."""
    rng = np.random.default_rng(53)
    count = 0
    with tempfile.TemporaryDirectory() as folder:
        marker = Path(folder) / "unpickled"
        payloads = [pickle.dumps(Bomb(marker), protocol=p) for p in (0, 4)]
        payloads += [rng.bytes(int(n)) for n in rng.integers(1, 400, FUZZED)]
        for request_path, request in bytes_in_fields(target, payloads[:6]):
            await harmless(target, request_path, request)
            count += 1
        for name, path in methods():
            for payload in payloads:
                await harmless(target, path, payload, what=name)
                count += 1
        expect(not marker.exists(), "bytes that were sent were unpickled")
    instance = (await target.stubs.info()).instance_id
    expect(instance == target.info.instance_id, "the server is another process after fuzzed bytes: it crashed")
    answer = await target.answer(target.ask(4))
    expect(len(answer.tokens()) == 4, "no tokens after fuzzed bytes")
    return f"{count} messages"


def methods() -> list[tuple[str, str]]:
    """(name, path) of every RPC."""
    return [
        (m.name, f"/{PACKAGE}.{service}/{m.name}")
        for module in FILES
        for service, d in module.DESCRIPTOR.services_by_name.items()
        for m in d.methods
    ]


def bytes_in_fields(target: Target, payloads: list[bytes]) -> list[tuple[str, bytes]]:
    """Well-formed requests with odd bytes in each bytes field."""
    made: list[tuple[str, bytes]] = []
    path = f"/{PACKAGE}.%s/%s"
    for data in payloads:
        generate = target.ask(2)
        generate.prompt_token_ids = data
        made.append((path % ("RolloutService", "Generate"), generate.SerializeToString()))
        score = generation_pb2.ScoreRequest(request_id=str(uuid.uuid4()), token_ids=data, score_from=1)
        made.append((path % ("RolloutService", "Score"), score.SerializeToString()))
        chunk = weights_pb2.UploadChunksRequest(update_id="fuzz", data=data)
        made.append((path % ("WeightService", "UploadChunks"), chunk.SerializeToString()))
        begin = weights_pb2.BeginUpdateRequest(update_id=str(uuid.uuid4()))
        begin.fence.trainer_epoch = 1 << 40
        begin.manifest.target_version = 1 << 40
        begin.manifest.digest = data
        begin.manifest.full.naming = "hf"
        begin.manifest.tensors.add(name="x", dtype=1, shape=[1], nbytes=4, content_digest=data)
        begin.transport.cuda_ipc.handles.add(tensor="x", device_uuid="GPU-x", handle=data)
        begin.fence.trainer_epoch = target.info.highest_trainer_epoch + 1
        made.append((path % ("WeightService", "BeginUpdate"), begin.SerializeToString()))
    return made


async def harmless(target: Target, path: str, payload: bytes, what: str = "") -> None:
    """A message of any bytes ends in an answer or a canonical refusal. Raises Failed."""
    call = target.stubs.channel.stream_stream(path)(timeout=CALL_S, metadata=target.stubs.metadata)
    try:
        await call.write(payload)
        await call.done_writing()
        async with asyncio.timeout(CALL_S):
            await call.read()
    except grpc.aio.AioRpcError as error:
        expect(
            error.code() not in UNCAUGHT,
            f"{what or path} with {len(payload)} odd bytes ended with {error.code().name}: {error.details()}",
        )
    except (TimeoutError, asyncio.InvalidStateError):
        pass
    finally:
        call.cancel()
