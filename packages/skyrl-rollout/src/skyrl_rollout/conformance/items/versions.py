"""Items 23 to 29: which weights made which token, and what becomes of running work and of its cache at a commit."""

from __future__ import annotations

import asyncio

import grpc
import numpy as np

from skyrl_rollout.conformance.answers import Answer, Reading
from skyrl_rollout.conformance.item import Failed, expect
from skyrl_rollout.conformance.items.tokens import check_whole
from skyrl_rollout.conformance.stubs import refused
from skyrl_rollout.conformance.target import Target
from skyrl_rollout.conformance.trainer import Draft, Trainer
from skyrl_rollout.v1 import control_pb2, weights_pb2
from skyrl_rollout.v1 import generation_pb2 as pb

KEEP, WAIT, ABORT = control_pb2.PAUSE_MODE_KEEP, control_pb2.PAUSE_MODE_WAIT, control_pb2.PAUSE_MODE_ABORT
RETAIN, RECOMPUTE = control_pb2.KV_POLICY_RETAIN, control_pb2.KV_POLICY_RECOMPUTE
OLD_TOKEN, NEW_TOKEN = 5, 6
COMPARED = 8  # tokens
CUT_ATTEMPTS = 5


async def wait_keeps_one_version(target: Target) -> None:
    """Item 23."""
    target.need("pause_modes:wait")
    trainer, old, new, update = await staged_over(target)
    running = target.read(target.ask(150, pace_s=0.003))
    await running.tokens(2)
    commit = asyncio.ensure_future(trainer.commit(update, old, mode=WAIT))
    await until_not_serving(target, commit)
    queued = target.read(target.ask(4))
    done_first = asyncio.ensure_future(running.rest())
    await asyncio.wait((commit, done_first), return_when=asyncio.FIRST_COMPLETED)
    early = commit.done() and not done_first.done() and (await target.stubs.status()).running
    answer, later = await done_first, await queued.rest()
    await commit
    expect(not early, "CommitUpdate with WAIT returned while the old generation still ran")
    expect(
        answer.spans() == [(0, 150, old, old)] and answer.reason() == "LENGTH",
        f"a generation from before a WAIT commit has spans {answer.spans()}, expected one of version {old}",
    )
    expect(later.version == new, f"a request queued during the commit reports version {later.version}, expected {new}")


async def keep_and_retain_cuts_exactly(target: Target) -> None:
    """Item 24. The old weights say one token and the new ones another, so the cut can be read off the tokens."""
    target.need("kv_policies:retain")
    answer, old, new = await cut_generation(target, RETAIN)
    k = check_cut(answer, old, new)
    expect(
        answer.spans()[1][3] == old,
        f"oldest_kv_version from token {k} on is {answer.spans()[1][3]}, the KV of version {old} was kept",
    )


async def keep_and_recompute_renews(target: Target) -> None:
    """Item 25."""
    target.need("kv_policies:recompute")
    answer, old, new = await cut_generation(target, RECOMPUTE)
    k = check_cut(answer, old, new)
    expect(
        answer.spans()[1][3] == new, f"oldest_kv_version from token {k} on is {answer.spans()[1][3]}, expected {new}"
    )
    trainer, before, after, update = await staged_over(target)
    prompt = target.prompt()
    reading = target.read(target.ask_long(prompt=prompt))
    await reading.tokens(4)
    await trainer.commit(update, before, mode=KEEP, kv=RECOMPUTE)
    answer = await reading.until(lambda a: after_cut(a, after) >= COMPARED, f"{COMPARED} tokens of version {after}", 30)
    reading.drop()
    ids = np.array(answer.tokens(), "<i4")
    start = next(d.offset for d in answer.deltas if d.weight_version == after)
    fresh = await target.answer(
        target.ask(COMPARED, prompt=np.concatenate([prompt, ids[:start]]), cache=pb.CacheOptions(bypass=True))
    )
    for i in range(COMPARED):
        got, expected = float(answer.logprobs()[start + i]), float(fresh.logprobs()[i])
        expect(
            abs(got - expected) <= target.tolerance,
            f"token {i} after a RECOMPUTE commit has logprob {got:.5f}, a fresh prefill answers {expected:.5f}",
        )
        if ids[start + i] != fresh.tokens()[i]:
            break  # two tokens as probable as each other: what follows differs


async def abort_hands_back_tokens(target: Target) -> None:
    """Item 26."""
    target.need("pause_modes:abort")
    trainer = await target.trainer()
    prompt, count = target.prompt(), target.lasting(80)
    whole = await target.answer(target.ask(count, prompt=prompt, pace_s=0.002))
    reading = target.read(target.ask(count, prompt=prompt, pace_s=0.01))
    await reading.tokens(5)
    pause = await trainer.pause(ABORT)
    expect(pause.aborted >= 1, f"PauseResponse.aborted is {pause.aborted}, expected the running request")
    part = await reading.rest()
    check_whole(part)
    made = part.tokens()
    expect(part.reason() == "PAUSED" and len(made) >= 5, f"ended with {part.reason()} after {len(made)} tokens")
    await trainer.resume(pause.pause_id)
    rest = await target.answer(
        target.ask(count - len(made), prompt=np.concatenate([prompt, np.array(made, "<i4")]), pace_s=0.002)
    )
    expect(made + rest.tokens() == whole.tokens(), "prompt + tokens, sent again, does not go on as the whole run did")


async def stop_never_mixes(target: Target) -> None:
    """Item 27."""
    trainer, old, _, update = await staged_over(target)
    policy = pb.VersionPolicy(on_commit=pb.VersionPolicy.ON_COMMIT_STOP)
    readings = [target.read(target.ask_long(version=policy)) for _ in range(3)]
    for reading in readings:
        await reading.tokens(3)
    await trainer.commit(update, old)
    for reading in readings:
        answer = await reading.rest()
        check_whole(answer)
        versions = {span[2] for span in answer.spans()}
        expect(
            versions == {old} and answer.reason() == "VERSION_CHANGED",
            f"ON_COMMIT_STOP ended with {answer.reason()} and versions {versions}, expected VERSION_CHANGED and {old}",
        )


async def commit_empties_the_cache(target: Target) -> None:
    """Item 28."""
    trainer, old, new, update = await staged_over(target)
    prompt = target.prompt(min(96, target.context // 2))
    for _ in range(2):
        await target.answer(target.ask(8, prompt=prompt))
    await trainer.commit(update, old)
    first = await target.answer(target.ask(16, prompt=prompt))
    cached = first.began.cached_prompt_tokens
    expect(cached == 0, f"cached_prompt_tokens is {cached} for the first request after a commit, expected 0")
    expect(first.version == new, f"the first request after the commit reports version {first.version}, expected {new}")
    cold = await target.answer(target.ask(16, prompt=prompt, cache=pb.CacheOptions(bypass=True)))
    warm = await target.answer(target.ask(16, prompt=prompt))
    for name, answer in (("the first request after a commit", first), ("a request with a warm cache", warm)):
        expect(answer.tokens() == cold.tokens(), f"{name} answers other tokens than one without a cache")
        worst = float(np.abs(answer.logprobs() - cold.logprobs()).max())
        expect(worst <= target.tolerance, f"{name}: logprobs differ by {worst:.2g} from those without a cache")


async def min_version_waits(target: Target) -> None:
    """Item 29."""
    trainer, old, new, update = await staged_over(target)
    ahead = target.read(target.ask(4, version=pb.VersionPolicy(min_weight_version=new)))
    await refused(
        target.read(target.ask(4, version=pb.VersionPolicy(min_weight_version=new + 100)), timeout_s=0.5).call,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        what="a request for a version that is not published before its deadline",
    )
    await trainer.commit(update, old)
    answer = await ahead.rest()
    expect(answer.version >= new, f"a request for version {new} was served by {answer.version}")
    expect(all(span[2] >= new for span in answer.spans()), f"a request for version {new} has spans {answer.spans()}")


async def staged_over(target: Target) -> tuple[Trainer, int, int, Draft]:
    """(trainer, committed version, the next one, its sealed update)."""
    trainer = await target.trainer()
    old = await trainer.version()
    update = await trainer.stage(target.noise(old + 1))
    return trainer, old, old + 1, update


async def cut_generation(target: Target, kv: int) -> tuple[Answer, int, int]:
    """A generation that is read slowly while new weights are committed over it with KEEP: (answer, old version, new).

    Where it was whole before the commit came, which a busy machine can do to any server, it is done again.
    """
    target.need("pause_modes:keep")
    trainer = await target.trainer()
    for _ in range(CUT_ATTEMPTS):
        old = await trainer.version() + 1
        await trainer.publish(target.saying(old, OLD_TOKEN))
        update = await trainer.stage(target.saying(old + 1, NEW_TOKEN))
        reading: Reading = target.read(target.ask(max(400, target.lasting(400)), pace_s=0.002))
        await reading.tokens(3)
        reply: weights_pb2.CommitUpdateResponse = await trainer.commit(update, old, mode=KEEP, kv=kv)
        await asyncio.sleep(0.2)
        answer = await reading.rest()
        if reply.frozen:
            expect(
                reply.frozen == 1, f"CommitUpdateResponse.frozen is {reply.frozen}, expected the one request that runs"
            )
            return answer, old, old + 1
        expect(
            answer.reason() == "LENGTH" and {span[2] for span in answer.spans()} == {old},
            f"CommitUpdateResponse.frozen is 0, and the request ended with {answer.reason()} and spans "
            f"{answer.spans()}: it ran at the commit and has to be counted",
        )
    raise Failed(f"{CUT_ATTEMPTS} requests in turn were whole before CommitUpdate with KEEP came over them")


def check_cut(answer: Answer, old: int, new: int) -> int:
    """How many tokens the old weights made, where spans and deltas agree with the tokens. Raises Failed."""
    check_whole(answer)
    tokens = answer.tokens()
    k = tokens.index(NEW_TOKEN) if NEW_TOKEN in tokens else len(tokens)
    expect(
        0 < k < len(tokens) and tokens == [OLD_TOKEN] * k + [NEW_TOKEN] * (len(tokens) - k),
        f"old weights say {OLD_TOKEN}, new ones {NEW_TOKEN}, but the tokens are not one run of each (from {k} on)",
    )
    spans = [span[:3] for span in answer.spans()]
    expected = [(0, k, old), (k, len(tokens) - k, new)]
    expect(spans == expected, f"the weights changed after {k} tokens; the spans are {spans}, expected {expected}")
    for d in answer.deltas:
        n = len(d.token_ids) // 4
        expect(
            d.weight_version == (old if d.offset < k else new) and (d.offset >= k or d.offset + n <= k),
            f"the delta at {d.offset} of {n} tokens says version {d.weight_version}; the cut is at {k}",
        )
    return k


def after_cut(answer: Answer, version: int) -> int:
    """How many tokens of this version there are."""
    return sum(len(d.token_ids) // 4 for d in answer.deltas if d.weight_version == version)


async def until_not_serving(target: Target, commit: asyncio.Future[object]) -> None:
    """Returns when the commit has begun to wait."""
    for _ in range(100):
        if commit.done() or (await target.stubs.status()).state != control_pb2.ENGINE_STATE_SERVING:
            return
        await asyncio.sleep(0.02)
    raise Failed("the server is still SERVING 2 s after CommitUpdate with WAIT was called over running work")
