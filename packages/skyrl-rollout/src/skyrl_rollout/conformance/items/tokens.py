"""Items 1 to 7: ids and logprobs arrive whole, and every parameter means what the protocol says."""

from __future__ import annotations

import asyncio
import json

import grpc
import numpy as np
import xxhash

from skyrl_rollout.conformance import made_weights
from skyrl_rollout.conformance.answers import Answer
from skyrl_rollout.conformance.copied_model import FAR_FROM_DEFAULT, copied_model
from skyrl_rollout.conformance.item import NotRun, expect
from skyrl_rollout.conformance.launching import LaunchedServer
from skyrl_rollout.conformance.stubs import Stubs, outcome, refused
from skyrl_rollout.conformance.target import Target
from skyrl_rollout.conformance.trainer import draft
from skyrl_rollout.v1 import control_pb2
from skyrl_rollout.v1 import generation_pb2 as pb
from skyrl_rollout.wire import crc32c_of, is_as_sent

INVALID = grpc.StatusCode.INVALID_ARGUMENT
DEFAULTS = {
    "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "min_tokens": 0, "ignore_eos": False,
    "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0,
}  # fmt: skip
KEPT_SHORT = 16  # what some servers take where max_tokens is unset
BIAS = 100.0


async def prompt_ids_arrive(target: Target) -> None:
    """Item 1."""
    for seed, length in ((1, 1), (2, 7), (3, 64)):
        ids = np.random.default_rng(seed).integers(0, target.vocab_size, length).astype("<i4")
        answer = await target.answer(target.ask(1, prompt=ids))
        expect(
            answer.began.prompt_token_digest == xxhash.xxh3_128_digest(ids.tobytes()),
            f"prompt_token_digest of {length} ids is {answer.began.prompt_token_digest.hex()}, not their xxh3-128",
        )


async def arrays_are_whole(target: Target) -> None:
    """Item 2."""
    free = await target.answer(target.ask(24))
    check_whole(free)
    ids = free.tokens()
    expect(len(ids) == 24, f"{len(ids)} tokens came, expected max_tokens 24")
    at = max(i for i in range(24) if ids.index(ids[i]) == i)
    stopped = await target.answer(target.ask(24, sampling={"stop_token_ids": [ids[at]]}))
    check_whole(stopped)
    expect(stopped.tokens() == ids[: at + 1], f"stop token {ids[at]} at {at}: got {stopped.tokens()}")
    expect(
        stopped.reason() == "STOP_TOKEN" and stopped.end().stop_token_id == ids[at],
        f"finish reason is {stopped.reason()} matching {stopped.end().stop_token_id}, expected STOP_TOKEN {ids[at]}",
    )
    if target.info.model.eos_token_ids:
        eos = target.info.model.eos_token_ids[0]
        forced = {"ignore_eos": False, "logit_bias": {eos: BIAS}}
        ended = await target.answer(target.ask(8, mode=pb.LOGPROB_MODE_SAMPLING, sampling=forced))
        check_whole(ended)
        expect(
            ended.tokens() == [eos] and ended.reason() == "EOS",
            f"with a bias for the end token: tokens {ended.tokens()}, reason {ended.reason()}; expected [{eos}], EOS",
        )


def check_whole(answer: Answer) -> None:
    """Every delta is dense and in step, and the end says what came."""
    offsets: dict[int, int] = {}
    for d in answer.deltas:
        n, ragged = divmod(len(d.token_ids), 4)
        expect(not ragged, f"a delta has {len(d.token_ids)} bytes of ids, expected a multiple of 4")
        expect(len(d.logprobs) == len(d.token_ids), f"a delta has {n} ids and {len(d.logprobs) / 4:g} logprobs")
        have = offsets.get(d.sample_index, 0)
        expect(d.offset == have, f"a delta of sample {d.sample_index} starts at {d.offset}, expected {have}")
        offsets[d.sample_index] = have + n
        expect(is_as_sent(d), f"crc32c of the delta at {d.offset} is {d.crc32c}, that of its arrays {crc32c_of(d)}")
    expect(answer.seqs == list(range(1, len(answer.seqs) + 1)), f"seqs are not dense from 1: {answer.seqs[:20]}")
    for index, end in answer.finished.items():
        data = b"".join(d.token_ids for d in answer.deltas if d.sample_index == index)
        expect(end.num_tokens == len(data) // 4, f"num_tokens is {end.num_tokens}, {len(data) // 4} came")
        expect(end.token_digest == xxhash.xxh3_128_digest(data), "token_digest is not that of the ids that came")
        covered = sum(s.length for s in end.spans)
        expect(covered == end.num_tokens, f"the version spans cover {covered} of {end.num_tokens} tokens")


async def unknown_logprobs_are_nan(target: Target) -> None:
    """Item 3."""
    trainer = await target.trainer()
    before = await trainer.version()
    try:
        await trainer.publish(draft(before + 1, made_weights.broken(target.layout), target.layout))
        answer = await target.answer(target.ask(8))
    finally:
        await trainer.publish(target.noise(await trainer.version() + 1))
    check_whole(answer)
    unknown = int(np.isnan(answer.logprobs()).sum())
    expect(len(answer.tokens()) == 8, f"under weights of NaN {len(answer.tokens())} tokens came, expected 8")
    expect(unknown > 0, f"under weights of NaN the logprobs are {answer.logprobs().tolist()}, expected NaN")
    expect(
        answer.end().invalid_logprobs == unknown,
        f"invalid_logprobs is {answer.end().invalid_logprobs}, but {unknown} logprobs are NaN",
    )
    healthy = await target.answer(target.ask(8))
    expect(
        bool(np.isfinite(healthy.logprobs()).all()) and not healthy.end().invalid_logprobs,
        f"after sound weights were published the logprobs are {healthy.logprobs().tolist()}",
    )


async def temperature_mode_is_exact(target: Target) -> None:
    """Item 4."""
    target.need("max_top_logprobs")
    if target.info.limits.max_top_logprobs < target.vocab_size:
        raise NotRun(f"a model whose vocabulary is at most max_top_logprobs {target.info.limits.max_top_logprobs}")
    for mode in {pb.LOGPROB_MODE_RAW, pb.LOGPROB_MODE_TEMPERATURE, pb.LOGPROB_MODE_SAMPLING}.difference(
        target.info.capabilities.logprob_modes
    ):
        await refused(target.read(target.ask(2, mode=mode)).call, INVALID, what=f"logprob mode {mode}, not offered")
    t, prompt, n = 0.5, target.prompt(), 6
    drawn = await target.answer(target.ask(n, mode=pb.LOGPROB_MODE_TEMPERATURE, sampling={"temperature": t, "seed": 3}))
    tokens = np.array(drawn.tokens(), "<i4")
    expect(drawn.began.mode == pb.LOGPROB_MODE_TEMPERATURE, f"Started.mode is {drawn.began.mode}, not TEMPERATURE")
    raw = await asyncio.gather(*(raw_logprobs(target, np.concatenate([prompt, tokens[:i]])) for i in range(n)))
    for i, raw_V in enumerate(raw):
        scaled = raw_V / t
        expected = float(scaled[tokens[i]] - np.logaddexp.reduce(scaled))
        got = float(drawn.logprobs()[i])
        expect(
            abs(got - expected) <= target.tolerance,
            f"token {i} at T=0.5 has logprob {got:.5f}, log_softmax(logits / T) is {expected:.5f}",
        )
    await check_one_candidate(target)


async def raw_logprobs(target: Target, prompt: np.ndarray) -> np.ndarray:
    """float64 [V]: log_softmax(logits) after a prompt, by RAW top_k = vocabulary."""
    answer = await target.answer(target.ask(1, prompt=prompt, top=target.vocab_size))
    ids, logprobs = answer.top()
    raw_V = np.full(target.vocab_size, -np.inf)
    raw_V[ids[0]] = logprobs[0]
    expect(bool(np.isfinite(raw_V).all()), f"RAW top_k={target.vocab_size} does not hold every token once")
    total = float(np.exp(raw_V).sum())
    expect(abs(total - 1) < 1e-2, f"RAW top_k = vocabulary sums to {total:.4f}, expected 1")
    return raw_V


async def check_one_candidate(target: Target) -> None:
    """With one candidate left SAMPLING is log 1; a server that cannot compute that has to refuse."""
    params = {"temperature": 0.5, "top_k": 1, "seed": 3}
    for mode in target.info.capabilities.logprob_modes:
        reading = target.read(target.ask(4, mode=mode, sampling=params))
        try:
            answer = await reading.rest()
        except grpc.aio.AioRpcError as error:
            expect(error.code() is INVALID, f"mode {mode} with top_k=1: {error.code().name}, {error.details()}")
            continue
        worst = float(np.abs(answer.logprobs()).max())
        if mode == pb.LOGPROB_MODE_SAMPLING:
            expect(worst < 1e-4, f"SAMPLING with top_k=1 answers {answer.logprobs().tolist()}, expected 0")


async def defaults_are_the_protocols(target: Target) -> str | None:
    """Item 5."""
    answer = await target.answer(pb_plain(target))
    effective = answer.began.effective
    for name, value in DEFAULTS.items():
        got = getattr(effective, name)
        expect(effective.HasField(name) and abs(got - value) < 1e-6, f"effective.{name} is {got}, expected {value}")
    expect(effective.HasField("seed"), "effective.seed is missing: a drawn seed has to be told")
    given = {
        "max_tokens": 5, "temperature": 0.75, "top_p": 0.5, "top_k": 7, "min_p": 0.125, "min_tokens": 2, "seed": 11,
        "ignore_eos": True, "frequency_penalty": 0.5, "presence_penalty": 0.25, "repetition_penalty": 1.25,
    }  # fmt: skip
    asked = target.ask(5, mode=pb.LOGPROB_MODE_SAMPLING, sampling=given)  # the one mode that each engine has for these
    effective = (await target.answer(asked)).began.effective
    for name, value in given.items():
        expect(getattr(effective, name) == value, f"effective.{name} is {getattr(effective, name)}, asked was {value}")
    return await check_generation_config(target)


def pb_plain(target: Target) -> pb.GenerateRequest:
    """A request that sets nothing but how many tokens."""
    request = target.ask(4)
    request.sampling.CopyFrom(pb.SamplingParams(max_tokens=4))
    return request


async def check_generation_config(target: Target) -> str | None:
    """A model folder that says other defaults must not change what is drawn."""
    if target.model is None:
        raise NotRun("model")
    path = target.model / "generation_config.json"
    said = json.loads(path.read_text()) if path.exists() else {}
    if said.get("top_p", 1.0) < 1.0 and said.get("top_k") == 1:
        await check_draws_freely(target, target.stubs)
        return None
    if target.launcher is None:
        raise NotRun("launcher, or a model folder whose generation_config.json says top_p below 1 and top_k 1")
    with copied_model(target.model, generation_config=FAR_FROM_DEFAULT) as folder:
        async with LaunchedServer(target.launcher, model=folder) as server, Stubs(server.url) as stubs:
            await check_draws_freely(target, stubs)
    return None


async def check_draws_freely(target: Target, stubs: Stubs) -> None:
    """16 samples at the protocol's defaults are not all the greedy one, and are longer than the folder says."""
    request = target.ask(8, num_samples=16)
    request.sampling.CopyFrom(pb.SamplingParams(max_tokens=8, ignore_eos=True, seed=5))
    answer = await target.read(request, stubs=stubs).rest()
    effective = answer.began.effective
    expect(effective.top_p == 1.0, f"generation_config.json changed effective.top_p to {effective.top_p:g}, expected 1")
    samples = {tuple(answer.tokens(i)) for i in range(16)}
    expect(len(samples) > 1, "16 samples at T=1 are equal: generation_config.json (top_k 1) was obeyed")
    expect(all(len(s) == 8 for s in samples), "samples are shorter than max_tokens: generation_config.json was obeyed")


async def unset_is_not_zero(target: Target) -> None:
    """Item 6."""
    prompt = target.prompt()
    reading = target.read(target.ask_long(prompt=prompt))
    answer = await reading.tokens(KEPT_SHORT + 4)
    reading.drop()
    room = target.context - len(prompt)
    got = answer.began.effective.max_tokens
    expect(got == room, f"unset max_tokens is {got}, expected the {room} that are left of the context")
    greedy = [await target.answer(target.ask(8, sampling={"temperature": 0.0, "seed": s})) for s in (1, 2)]
    expect(greedy[0].began.effective.temperature == 0.0, "temperature=0 is echoed as another value")
    expect(greedy[0].tokens() == greedy[1].tokens(), "temperature=0 with two seeds gives two answers: not greedy")
    if target.offers("max_top_logprobs"):
        best = await target.answer(target.ask(8, top=1))
        expect(best.tokens() == best.top()[0][:, 0].tolist(), "temperature=0 drew not the most probable token")


async def unknown_is_told_apart(target: Target) -> None:
    """Item 7."""
    unknown = {
        "logprobs.mode": target.ask(2, mode=99),
        "extras": target.ask(2, extras=[99]),
        "version.on_commit": target.ask(2, version=pb.VersionPolicy(on_commit=99)),  # type: ignore[arg-type]
    }
    for field, request in unknown.items():
        await refused(target.read(request).call, INVALID, what=f"the unknown value 99 in {field}")
    trainer = await target.trainer()
    pause = control_pb2.PauseRequest(fence=trainer.fence(), mode=99)  # type: ignore[arg-type]
    await refused(target.stubs.engine.Pause(pause), INVALID, what="the unknown value 99 in PauseRequest.mode")
    later = target.ask(2).SerializeToString() + b"\xfa\xff\x01\x03abc"  # field 4095, which nobody has
    call = target.stubs.channel.unary_stream(
        "/skyrl_rollout.v1.RolloutService/Generate", response_deserializer=pb.GenerateResponse.FromString
    )
    error = await outcome(call(later, metadata=target.stubs.metadata, timeout=10))
    expect(error is None, f"an unknown field is not ignored: {error.message if error else ''}")
    request = target.ask(2)
    request.backend_options["no_such_option"] = 1
    await refused(
        target.read(request).call, INVALID, grpc.StatusCode.UNIMPLEMENTED, what="a backend_option that is not listed"
    )
