"""Bad input from a client that we did not write: it is told what is wrong and what to do, and the server keeps serving.

The client is `reflected_client.py`: it learns messages and methods from the server. The names of the tests are those of
the conformance items.
"""

from __future__ import annotations

import os
import pickle
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reflected_client import Named, Owner, ReflectedClient, Refusal, chunk, shard_of
from skyrl_rollout.reference.process import ReferenceServer

PROMPT = np.arange(1, 9, dtype="<i4")
CONTEXT, CHUNK_BYTES = 256, 65536
FLAGS = ("--logits", "canary", "--delta", "--max-context", str(CONTEXT), "--max-chunk-bytes", str(CHUNK_BYTES))
GENERATE, SCORE = "RolloutService/Generate", "RolloutService/Score"
BEGIN, UPLOAD, SEAL = "WeightService/BeginUpdate", "WeightService/UploadChunks", "WeightService/SealUpdate"
COMMIT, PULL, ABORT = "WeightService/CommitUpdate", "WeightService/PullUpdate", "WeightService/AbortUpdate"
F16 = 2
RANK = 2
HEAD, BODY = "base_model.model.model.embed_tokens", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def server() -> Iterator[ReferenceServer]:
    with ReferenceServer(*FLAGS) as process:
        yield process


@pytest.fixture(scope="module")
def described(server: ReferenceServer) -> Iterator[ReflectedClient]:
    opened = ReflectedClient(server.target)
    yield opened
    opened.close()


@pytest.fixture
def client(server: ReferenceServer, described: ReflectedClient) -> Iterator[ReflectedClient]:
    """After the test the server has to be the same process, at rest, and generate."""
    yield described
    assert_serves(described)
    assert described.call("EngineService/GetServerInfo", {})[0].instance_id == server.ready["instance"]


@pytest.fixture
def owner(client: ReflectedClient) -> Owner:
    return Owner(client)


def assert_serves(client: ReflectedClient) -> None:
    answer = client.call(GENERATE, asking())
    assert sum(len(m.delta.token_ids) for m in answer) == 4 * 4
    assert answer[-1].sample_finished.num_tokens == 4


def asking(**fields: Any) -> dict[str, Any]:
    """A request that nothing is wrong with, but for `fields`."""
    sampling = {"max_tokens": 4, "ignore_eos": True, "seed": 7}
    return {
        "request_id": str(uuid.uuid4()), "prompt_token_ids": PROMPT.tobytes(), "sampling": sampling
    } | fields  # fmt: skip


def assert_told(refusal: Refusal | None, code: str, reason: str, *said: str, field: str = "") -> Refusal:
    """The call failed with this code and reason; the sentence says each of `said`, BadRequest names `field`."""
    assert refusal is not None, "the call succeeded"
    assert (refusal.code, refusal.domain, refusal.reason) == (code, "rollout.skyrl", reason), refusal
    for words in said:
        assert words in refusal.message
    if field:
        assert any(field in name for name in refusal.fields), refusal
    return refusal


UNKNOWN = {
    "logprobs.mode": (GENERATE, asking(logprobs={"mode": 99}), "RAW, TEMPERATURE, SAMPLING"),
    "extras": (GENERATE, asking(extras=[99]), "routed_experts"),
    "version.on_commit": (GENERATE, asking(version={"on_commit": 99}), "continue, stop"),
    "mode": ("EngineService/Pause", {"mode": 99}, "abort, wait, keep"),
    "admission": ("EngineService/Pause", {"mode": 3, "admission": 99}, "queue, reject"),
    "level": ("EngineService/Sleep", {"level": 99}, "offload, discard"),
    "kv": (COMMIT, {"update_id": "x", "kv": 99}, "recompute, retain"),
}


@pytest.mark.parametrize("field", UNKNOWN)
def test_07_an_unknown_enum_value_is_refused_with_the_known_ones(
    client: ReflectedClient, owner: Owner, field: str
) -> None:
    method, request, known = UNKNOWN[field]
    fence = {} if method == GENERATE else {"fence": owner.fence()}
    assert_told(client.refusal(method, request | fence), "INVALID_ARGUMENT", "INVALID", field, "99", known)


def test_07_an_unknown_field_is_ignored_and_an_option_that_is_not_listed_is_refused(client: ReflectedClient) -> None:
    later = client.message(GENERATE, asking()).SerializeToString() + b"\xfa\xff\x01\x03abc"  # field 4095
    assert client.refusal(GENERATE, later) is None
    refusal = client.refusal(GENERATE, asking(backend_options={"no_such_option": 1}))
    told = assert_told(refusal, "UNIMPLEMENTED", "CAPABILITY", "no_such_option", "GetServerInfo.capabilities")
    assert told.metadata == {"capability": "backend_options"}


def test_09_the_same_id_with_other_bytes_is_refused_and_a_new_id_asked_for(client: ReflectedClient) -> None:
    first = asking()
    client.call(GENERATE, first)
    other = client.refusal(GENERATE, first | {"num_samples": 2})
    assert_told(other, "ALREADY_EXISTS", "REQUEST_ID_REUSED", first["request_id"], "mint a new UUID")
    assert client.refusal(GENERATE, first) is None


def ids(count: int) -> bytes:
    return np.ones(count, "<i4").tobytes()


# What is wrong with a request -> its fields, and what the refusal has to say.
MALFORMED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "prompt as long as the context": (asking(prompt_token_ids=ids(CONTEXT)), (str(CONTEXT), "shorten it")),
    "prompt longer than it": (asking(prompt_token_ids=ids(CONTEXT + 1)), (f"{CONTEXT + 1}", "shorten it")),
    "no prompt": (asking(prompt_token_ids=b""), ("prompt_token_ids", "at least one token")),
    "half an id": (asking(prompt_token_ids=b"1234567"), ("prompt_token_ids", "multiple of 4")),
    "an id beyond the vocabulary": (
        asking(prompt_token_ids=np.array([1 << 20], "<i4").tobytes()), ("prompt_token_ids", "[0, 64)")
    ),
    "a negative id": (asking(prompt_token_ids=np.array([-1], "<i4").tobytes()), ("prompt_token_ids", "[0, 64)")),
    "no request id": (asking(request_id=""), ("request_id", "mint a UUID")),
    "no token wanted": (asking(sampling={"max_tokens": 0}), ("sampling.max_tokens", "at least 1")),
    "a negative temperature": (asking(sampling={"temperature": -1.0}), ("sampling.temperature", "0 is greedy")),
    "a temperature that is no number": (
        asking(sampling={"temperature": float("nan")}), ("sampling.temperature", "finite")
    ),
    "top_p of nothing": (asking(sampling={"top_p": 0.0}), ("sampling.top_p", "above 0 and at most 1")),
    "no sample": (asking(num_samples=0), ("num_samples", "1 to 1024")),
    "a negative duration": (asking(detach_grace={"seconds": -1}), ("detach_grace", "cannot be negative")),
    "too long a grace": (asking(detach_grace={"seconds": 3601}), ("detach_grace", "3600")),
    "more top logprobs than there are tokens": (asking(logprobs={"top_k": 65}), ("logprobs.top_k", "64")),
}  # fmt: skip


@pytest.mark.parametrize("wrong", MALFORMED)
def test_16_a_prompt_that_fills_the_context_and_other_malformed_requests_say_what_is_taken(
    client: ReflectedClient, wrong: str
) -> None:
    request, said = MALFORMED[wrong]
    assert_told(client.refusal(GENERATE, request), "INVALID_ARGUMENT", "INVALID", *said)


def test_16_scores_are_checked_alike(client: ReflectedClient) -> None:
    for score_from in (0, len(PROMPT)):
        refusal = client.refusal(SCORE, {"token_ids": PROMPT.tobytes(), "score_from": score_from})
        assert_told(refusal, "INVALID_ARGUMENT", "INVALID", "score_from", f"1 to {len(PROMPT) - 1}")


def test_36_a_flipped_byte_is_data_loss_and_the_shard_can_be_sent_again(client: ReflectedClient, owner: Owner) -> None:
    version, tensors = owner.version(), owner.tensors(3)
    shard = bytearray(shard_of(tensors))
    update_id = owner.begin(owner.manifest(version + 1, tensors))
    torn = client.refusal(UPLOAD, chunk(update_id, 0, b"abc", crc32c=1))
    assert_told(torn, "DATA_LOSS", "CORRUPT", "crc32c", "send it again")
    shard[len(shard) // 2] ^= 1
    owner.upload(update_id, bytes(shard))
    flipped = client.refusal(SEAL, owner.order(update_id))
    assert_told(flipped, "DATA_LOSS", "CORRUPT", BODY, "send their shards again")
    unsealed = client.refusal(COMMIT, owner.order(update_id, expected_version=version))
    assert_told(unsealed, "FAILED_PRECONDITION", "WRONG_STATE", "SealUpdate")
    owner.upload(update_id, shard_of(tensors))
    client.call(SEAL, owner.order(update_id))
    client.call(COMMIT, owner.order(update_id, expected_version=version))
    assert owner.version() == version + 1


def misfits(tensors: list[Named]) -> dict[str, tuple[list[Named], str]]:
    """What is wrong -> the tensors offered, and the name that has to be in BadRequest."""
    last = tensors[-1]
    rows = last.shape[0]
    return {
        "missing": (tensors[:-1], last.name),
        "extra": ([*tensors, Named("no.such.tensor", last.dtype, last.shape, last.data)], "no.such.tensor"),
        "another shape": ([*tensors[:-1], Named(last.name, last.dtype, (rows, 1), last.data)], last.name),
        "another dtype": ([*tensors[:-1], Named(last.name, F16, last.shape, last.data[: 2 * rows])], last.name),
    }


@pytest.mark.parametrize("wrong", ["missing", "extra", "another shape", "another dtype"])
def test_37_a_tensor_that_does_not_fit_is_named_in_bad_request(
    client: ReflectedClient, owner: Owner, wrong: str
) -> None:
    offered, name = misfits(owner.tensors(5))[wrong]
    refusal = client.refusal(BEGIN, owner.beginning(owner.manifest(owner.version() + 1, offered)))
    assert_told(refusal, "INVALID_ARGUMENT", "MODEL_MISMATCH", name, "1 tensors do not fit", field=name)


def test_37_a_manifest_at_odds_with_itself_is_refused(client: ReflectedClient, owner: Owner) -> None:
    manifest = owner.manifest(owner.version() + 1, owner.tensors(5))
    wrong: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
        "digest": ({"digest": bytes(16)}, ("manifest.digest", "weights.proto")),
        "tensors": ({"tensors": []}, ("names no tensor",)),
        "full": ({"full": {"naming": "mine"}}, ("manifest.kind", "'hf'")),
        "target_version": ({"target_version": 0}, ("target_version", "version 0 is the model as loaded")),
        "policy_id": ({"policy_id": "mine"}, ("policy_id", "adapter")),
    }
    for changed, said in wrong.values():
        refusal = client.refusal(BEGIN, owner.beginning({**manifest, **changed}))
        assert_told(refusal, "INVALID_ARGUMENT", "INVALID", *said)
    unnamed = client.refusal(BEGIN, owner.beginning(manifest, update_id=""))
    assert_told(unnamed, "INVALID_ARGUMENT", "INVALID", "update_id", "mint a UUID")
    nothing = client.refusal(BEGIN, owner.beginning(manifest, transport={}))
    assert_told(nothing, "INVALID_ARGUMENT", "INVALID", "transport is missing", "inline")


def test_40_versions_never_go_back_and_the_next_one_is_named(client: ReflectedClient, owner: Owner) -> None:
    version = owner.version() + 3
    owner.publish(owner.tensors(7), version, over=version - 3)
    for target in (version - 1, version):
        refusal = client.refusal(BEGIN, owner.beginning(owner.manifest(target, owner.tensors(9))))
        told = assert_told(refusal, "FAILED_PRECONDITION", "VERSION_CONFLICT", f"publish as {version + 1}")
        assert told.metadata == {"current_version": str(version)}
    same = owner.begin(owner.manifest(version, owner.tensors(7)))
    client.call(COMMIT, owner.order(same, expected_version=version))
    assert owner.version() == version


def changed(tensor: Named) -> Named:
    """The first value of the tensor, as an overwrite delta."""
    whole = bytearray(tensor.data)
    whole[:4] = b"\0\0\0\x3d"
    index, value = bytes(4), bytes(whole[:4])
    return Named(tensor.name, tensor.dtype, tensor.shape, bytes(whole), index + value)


def test_41_a_delta_over_another_version_is_told_the_current_one(client: ReflectedClient, owner: Owner) -> None:
    version = owner.version() + 2
    tensors = owner.tensors(11)
    owner.publish(tensors, version, over=version - 2)
    i32 = {"overwrite": {"index_encoding": "i32"}}
    for base in (version - 1, version + 4):
        manifest = owner.manifest(version + 1, [changed(tensors[0])], base_version=base, **i32)
        refusal = client.refusal(BEGIN, owner.beginning(manifest))
        told = assert_told(refusal, "FAILED_PRECONDITION", "VERSION_CONFLICT", str(base), f"version {version}")
        assert told.metadata == {"current_version": str(version)}
    encoded = owner.manifest(
        version + 1, [changed(tensors[0])], base_version=version, overwrite={"index_encoding": "u64"}
    )
    assert_told(
        client.refusal(BEGIN, owner.beginning(encoded)), "INVALID_ARGUMENT", "INVALID", "index_encoding", "'i32'"
    )
    for target in (version + 1, version + 2):
        owner.publish([changed(tensors[0])], target, over=target - 1, base_version=target - 1, **i32)
    assert owner.version() == version + 2


def test_42_a_lower_epoch_is_fenced_on_every_order_and_told_who_owns_the_server(
    client: ReflectedClient, owner: Owner
) -> None:
    update_id = owner.begin(owner.manifest(owner.version() + 1, owner.tensors(13)))
    new = Owner(client)
    state = client.call("WeightService/GetUpdate", {"update_id": update_id})[0].state
    assert state == 5  # UPDATE_STATE_ABORTED
    orders: dict[str, dict[str, Any]] = {
        "EngineService/Pause": {"mode": 3},
        "EngineService/Resume": {"pause_id": "any"},
        "EngineService/ResetCache": {},
        "EngineService/Sleep": {"level": 2},
        "EngineService/WakeUp": {},
        BEGIN: owner.beginning(owner.manifest(owner.version() + 1, owner.tensors(13))),
        **{method: {"update_id": update_id} for method in (PULL, SEAL, COMMIT, ABORT)},
    }
    for method, fields in orders.items():
        told = assert_told(
            client.refusal(method, fields | {"fence": owner.fence()}),
            "ABORTED", "FENCED", f"epoch {owner.epoch}", f"epoch {new.epoch}", "stop this trainer",
        )  # fmt: skip
        assert told.metadata == {"highest_epoch": str(new.epoch)}
    claim = client.refusal("EngineService/AcquireControl", {"owner": "zombie", "claim_epoch": owner.epoch})
    assert_told(claim, "ABORTED", "FENCED", "AcquireControl")
    unfenced = client.refusal("EngineService/Pause", {"mode": 3})
    assert_told(unfenced, "INVALID_ARGUMENT", "INVALID", "fence", "UUID")


def test_43_a_chunk_that_is_too_large_or_leaves_a_hole_or_overlaps_is_refused_with_the_offset(
    client: ReflectedClient, owner: Owner
) -> None:
    tensors = owner.tensors(15)
    shard = shard_of(tensors)
    update_id = owner.begin(owner.manifest(owner.version() + 1, tensors))
    client.call(UPLOAD, chunk(update_id, 0, shard[:1024]))
    hole = client.refusal(UPLOAD, chunk(update_id, 1040, shard[1040:1056]))
    told = assert_told(hole, "OUT_OF_RANGE", "OFFSET_HOLE", "1040", "1024", "send from there")
    assert told.metadata == {"durable_offset": "1024", "shard": "0"}
    wrong: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
        "overlap": (chunk(update_id, 1000, shard[1000:1040]), ("1000", "1024", "send from there")),
        "beyond the shard": (chunk(update_id, 1024, bytes(len(shard))), (str(len(shard)),)),
        "no such shard": (chunk(update_id, 0, b"abcd", shard=9), ("shard 9",)),
        "too large": (chunk(update_id, 1024, bytes(CHUNK_BYTES + 1)), (str(CHUNK_BYTES), "chunk_bytes")),
    }
    for fields, said in wrong.values():
        assert_told(client.refusal(UPLOAD, fields), "INVALID_ARGUMENT", "INVALID", *said)
    assert_told(client.refusal(UPLOAD), "INVALID_ARGUMENT", "INVALID", "at least one")
    early = client.refusal(SEAL, owner.order(update_id))
    assert_told(early, "FAILED_PRECONDITION", "WRONG_STATE", "incomplete", "send or pull the rest")
    unknown = client.refusal(UPLOAD, chunk("no such update", 0, b"abcd"))
    assert_told(unknown, "NOT_FOUND", "UNKNOWN_UPDATE", "no such update", "begin again")
    owner.abort(update_id)
    late = client.refusal(SEAL, owner.order(update_id))
    assert_told(late, "FAILED_PRECONDITION", "WRONG_STATE", "ABORTED", "begin again")


@contextmanager
def shared_memory(data: bytes) -> Iterator[str]:
    path = Path("/dev/shm") / f"reflected-{uuid.uuid4().hex}"
    path.write_bytes(data)
    path.chmod(0o600)
    try:
        yield path.name
    finally:
        path.unlink()


def test_44_shared_memory_that_is_not_what_it_says_is_refused(client: ReflectedClient, owner: Owner) -> None:
    tensors, here = owner.tensors(17), owner.info().shm_namespace_id
    manifest, shard = owner.manifest(owner.version() + 1, tensors), shard_of(tensors)

    def refusal(name: str, namespace: str = here) -> Refusal | None:
        segments = [{"shard": 0, "name": name, "nbytes": len(shard)}]
        fields = owner.beginning(manifest, transport={"shm": {"namespace_id": namespace, "segments": segments}})
        found = client.refusal(BEGIN, fields)
        if found is None:
            found = client.refusal(PULL, owner.order(fields["update_id"]))
            owner.abort(fields["update_id"])
        return found

    with shared_memory(shard) as good, shared_memory(shard[:-64]) as short:
        link = Path("/dev/shm") / f"{good}-link"
        os.symlink(f"/dev/shm/{good}", link)
        try:
            assert_told(refusal(link.name), "INVALID_ARGUMENT", "INVALID", link.name, "link")
        finally:
            link.unlink()
        assert_told(refusal(short), "INVALID_ARGUMENT", "INVALID", short, str(len(shard)))
        foreign = refusal(good, "another host:1")
        assert_told(foreign, "FAILED_PRECONDITION", "WRONG_STATE", "another host:1", "inline")
    assert_told(refusal("no-such-segment"), "FAILED_PRECONDITION", "WRONG_STATE", "no-such-segment")
    for path in ("../../etc/passwd", "/etc/passwd", ""):
        assert_told(refusal(path), "INVALID_ARGUMENT", "INVALID", "name")


def adapter(owner: Owner, seed: int) -> list[Named]:
    """Both factors for the embedding."""
    base = next(t for t in owner.tensors(1) if t.name == BODY)
    rows, columns = base.shape
    value = bytes([seed, seed, seed, 0x3C])
    return [
        Named(f"{HEAD}.lora_A.weight", base.dtype, (RANK, columns), value * (RANK * columns)),
        Named(f"{HEAD}.lora_B.weight", base.dtype, (rows, RANK), value * (rows * RANK)),
    ]


def test_45_an_unknown_policy_is_not_found_and_a_version_has_one_content(client: ReflectedClient, owner: Owner) -> None:
    policy = f"policy-{uuid.uuid4().hex[:8]}"
    fingerprint = owner.info().model.fingerprint
    lora = {"base_fingerprint": fingerprint, "rank": RANK, "alpha": 4.0, "target_modules": ["embed_tokens"]}
    scored = {"token_ids": PROMPT.tobytes(), "score_from": 1, "policy_id": policy}
    for method, request in ((GENERATE, asking(policy_id=policy)), (SCORE, scored)):
        assert_told(client.refusal(method, request), "NOT_FOUND", "UNKNOWN_POLICY", policy, "publish")
    owner.publish(adapter(owner, 1), 1, over=0, policy_id=policy, lora=lora)
    assert client.refusal(GENERATE, asking(policy_id=policy)) is None
    other = owner.manifest(1, adapter(owner, 2), policy_id=policy, lora=lora)
    told = assert_told(
        client.refusal(BEGIN, owner.beginning(other)), "ALREADY_EXISTS", "VERSION_REUSED", policy, "publish as 2"
    )
    assert told.metadata == {"current_version": "1"}
    foreign = owner.manifest(2, adapter(owner, 2), policy_id=policy, lora={**lora, "base_fingerprint": "another"})
    assert_told(
        client.refusal(BEGIN, owner.beginning(foreign)), "INVALID_ARGUMENT", "MODEL_MISMATCH", "another", fingerprint
    )
    narrow = owner.manifest(2, adapter(owner, 2), policy_id=policy, lora={**lora, "rank": RANK + 1})
    assert_told(
        client.refusal(BEGIN, owner.beginning(narrow)), "INVALID_ARGUMENT", "MODEL_MISMATCH", "expected",
        field=f"{HEAD}.lora_A.weight",
    )  # fmt: skip


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ReferenceServer, dict[str, str]]]:
    """A server that asks for tokens, and the token of each role."""
    tokens = {role: uuid.uuid4().hex for role in ("control", "rollout")}
    flags: list[str] = []
    for role, token in tokens.items():
        path = tmp_path_factory.mktemp("tokens") / role
        path.touch(mode=0o600)
        path.write_text(token)
        flags += ["--token-file", f"{role}={path}"]
    with ReferenceServer(*FLAGS, *flags) as process:
        yield process, tokens


def test_51_a_call_without_a_good_credential_is_told_so_and_an_agent_cannot_give_orders(
    described: ReflectedClient, guarded: tuple[ReferenceServer, dict[str, str]]
) -> None:
    process, tokens = guarded
    for token in ("", "not-" + uuid.uuid4().hex, tokens["rollout"][:-1]):
        stranger = ReflectedClient(process.target, token=token, described_by=described)
        remedy = "read it again" if token else "send `authorization: Bearer TOKEN`"
        for method in described.methods():
            told = assert_told(stranger.refusal(method, {}), "UNAUTHENTICATED", "UNAUTHENTICATED", remedy)
            assert not token or token not in told.message
        stranger.close()
    agent = ReflectedClient(process.target, token=tokens["rollout"], described_by=described)
    allowed = {"EngineService/GetServerInfo", "EngineService/WatchStatus"}
    for method in described.methods():
        if not method.startswith("RolloutService/") and method not in allowed:
            told = assert_told(agent.refusal(method, {}), "PERMISSION_DENIED", "ROLE", "rollout", "control")
            assert told.metadata == {"role_needed": "control", "role": "rollout"}
    assert_serves(agent)
    agent.close()
    trainer = ReflectedClient(process.target, token=tokens["control"], described_by=described)
    Owner(trainer)
    assert_serves(trainer)
    trainer.close()


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.mkdir, (self.path,))


def test_53_fuzzed_bytes_in_every_bytes_field_are_refused_and_never_unpickled(
    client: ReflectedClient, owner: Owner, tmp_path: Path
) -> None:
    marker, rng = tmp_path / "unpickled", np.random.default_rng(53)
    odd = [pickle.dumps(Bomb(marker), protocol=p) for p in (0, 4)] + [
        rng.bytes(int(n)) for n in rng.integers(1, 300, 12)
    ]
    tensors = owner.tensors(19)
    manifest = owner.manifest(owner.version() + 1, tensors)
    update_id = owner.begin(manifest)
    for data in odd:
        in_fields = {
            GENERATE: asking(prompt_token_ids=data + b"\0" * (-len(data) % 4 + 1)),
            SCORE: {"token_ids": data + b"\0" * (-len(data) % 4 + 1), "score_from": 1},
            UPLOAD: chunk(update_id, 0, data, crc32c=0),
            BEGIN: owner.beginning({**manifest, "digest": data}),
        }
        for method, fields in in_fields.items():
            refusal = client.refusal(method, fields)
            assert refusal is not None and refusal.reason in ("INVALID", "CORRUPT"), (method, data, refusal)
            assert refusal.domain == "rollout.skyrl" and len(refusal.message) > 20
        content = [{**spec, "content_digest": data} for spec in manifest["tensors"]]
        refusal = client.refusal(BEGIN, owner.beginning({**manifest, "tensors": content}))
        assert_told(refusal, "INVALID_ARGUMENT", "INVALID", "digest")
        for method in client.methods():
            refusal = client.refusal(method, data)
            assert refusal is None or (refusal.domain, refusal.reason != "") == ("rollout.skyrl", True), (
                method, data, refusal,
            )  # fmt: skip
    assert not marker.exists()
    owner.abort(update_id)


def test_the_client_knows_every_service_and_nothing_of_ours(client: ReflectedClient) -> None:
    assert client.services() == [f"skyrl_rollout.v1.{s}" for s in ("EngineService", "RolloutService", "WeightService")]
    assert len(client.methods()) == 18
    source = (Path(__file__).parent / "reflected_client.py").read_text()
    assert "import skyrl" not in source and "from skyrl" not in source
    assert type(client.message(GENERATE, {})).__module__ != "skyrl_rollout.v1.generation_pb2"
