"""Items 45 and 46: adapters are never mistaken for the base, and a server that sleeps serves nothing."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import grpc
import numpy as np

from skyrl_rollout.conformance import made_weights
from skyrl_rollout.conformance.item import Failed, NotRun, expect
from skyrl_rollout.conformance.stubs import refused
from skyrl_rollout.conformance.target import Target
from skyrl_rollout.conformance.trainer import Draft, draft
from skyrl_rollout.v1 import control_pb2
from skyrl_rollout.v1 import generation_pb2 as gen
from skyrl_rollout.weights.manifest import Lora, TensorLayout

RANK = 8
PREFERRED = ("q_proj", "embed_tokens")
NOT_FOUND = grpc.StatusCode.NOT_FOUND
STRENGTH = 4.0


async def adapters_are_not_the_base(target: Target) -> None:
    """Item 45."""
    unknown = f"no-such-policy-{uuid.uuid4().hex[:8]}"
    await refused(target.read(target.ask(4, policy_id=unknown)).call, NOT_FOUND, what="Generate for an unknown policy")
    if target.offers("score"):
        request = gen.ScoreRequest(
            request_id=str(uuid.uuid4()), token_ids=target.prompt().tobytes(), score_from=1, policy_id=unknown
        )
        await refused(target.stubs.rollout.Score(request), NOT_FOUND, what="Score for an unknown policy")
    target.need("lora")
    trainer = await target.trainer()
    policy = f"adapter-{uuid.uuid4().hex[:8]}"
    base = await target.answer(target.ask(8))
    one, other = adapter(target, policy, 1, seed=1), adapter(target, policy, 1, seed=2)
    await trainer.publish(one)
    served = await target.answer(target.ask(8, policy_id=policy))
    expect(served.version == 1, f"a request for the adapter reports version {served.version}, its version is 1")
    differs = served.tokens() != base.tokens() or not np.array_equal(served.logprobs(), base.logprobs())
    expect(differs, "an adapter answers exactly what the base does")
    error = await refused(
        trainer.begin(other), grpc.StatusCode.ALREADY_EXISTS, what="other bytes as the same version of a policy"
    )
    expect(error.reason == "VERSION_REUSED", f"ErrorInfo.reason is {error.reason}, expected VERSION_REUSED")
    await trainer.begin(Draft(one.manifest, one.shard))
    again = await target.answer(target.ask(8, policy_id=policy))
    expect(again.tokens() == served.tokens(), "the adapter answers otherwise after a refused update")
    expect((await target.answer(target.ask(8))).tokens() == base.tokens(), "an adapter changed what the base answers")
    await refused(target.read(target.ask(4, policy_id=unknown)).call, NOT_FOUND, what="Generate for an unknown policy")


def adapter(target: Target, policy_id: str, version: int, *, seed: int) -> Draft:
    """An adapter for every matrix of one kind."""
    modules, kind = adapted_modules(target.layout)
    layout: list[TensorLayout] = []
    for module in modules:
        prefix = "base_model.model." + module.name.removesuffix(".weight")
        rows, columns = module.shape
        layout.append(TensorLayout(f"{prefix}.lora_A.weight", module.dtype, (RANK, columns)))
        layout.append(TensorLayout(f"{prefix}.lora_B.weight", module.dtype, (rows, RANK)))
    rng = np.random.default_rng(seed)
    weights = {t.name: made_weights.to_bytes(rng.standard_normal(t.shape, np.float32) / 4, t.dtype) for t in layout}
    lora = Lora(target.info.model.fingerprint, RANK, RANK * STRENGTH, (kind,))
    return draft(version, weights, layout, policy_id=policy_id, lora=lora)


def adapted_modules(layout: Sequence[TensorLayout]) -> tuple[list[TensorLayout], str]:
    """(the matrices of one kind, how their names end). Raises NotRun."""
    for kind in PREFERRED:
        found = [t for t in layout if t.name.endswith(f"{kind}.weight") and len(t.shape) == 2]
        if found:
            return found, kind
    raise NotRun(f"a model with matrices named {' or '.join(PREFERRED)}")


async def sleep_with_discard_awaits_weights(target: Target) -> None:
    """Item 46."""
    target.need("sleep")
    trainer = await target.trainer()
    version = await trainer.version()
    engine, precondition = target.stubs.engine, grpc.StatusCode.FAILED_PRECONDITION
    level = control_pb2.SleepRequest.LEVEL_DISCARD
    await engine.Sleep(control_pb2.SleepRequest(fence=trainer.fence(), level=level), timeout=60)
    state = (await target.stubs.status()).state
    try:
        expect(state == control_pb2.ENGINE_STATE_ASLEEP, f"state is {state} after Sleep, expected ASLEEP")
        await refused(target.read(target.ask(4)).call, precondition, what="Generate while asleep")
        reply = await engine.WakeUp(control_pb2.WakeUpRequest(fence=trainer.fence()), timeout=60)
        expect(
            reply.state == control_pb2.ENGINE_STATE_AWAITING_WEIGHTS,
            f"WakeUp after DISCARD answers state {reply.state}, expected AWAITING_WEIGHTS",
        )
        await refused(target.read(target.ask(4)).call, precondition, what="Generate while weights are awaited")
    finally:
        await engine.WakeUp(control_pb2.WakeUpRequest(fence=trainer.fence()), timeout=60)
        update = target.noise(version + 1)
        await trainer.publish(update)
    answer = await target.answer(target.ask(4))
    if answer.version != version + 1:
        raise Failed(f"version {answer.version} serves after the commit that ended the wait, expected {version + 1}")
