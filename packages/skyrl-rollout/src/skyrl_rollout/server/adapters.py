"""Low-rank adapters: whether one fits the served model, and which are loaded, a bounded number of them."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence

from skyrl_rollout.errors import InvalidRequest, ModelMismatch, Overloaded
from skyrl_rollout.server.engine import Adapter, Engine, ModelIdentity
from skyrl_rollout.server.registry import RunRegistry
from skyrl_rollout.server.state import BASE_POLICY, ServerState
from skyrl_rollout.weights.manifest import Manifest, TensorLayout, fingerprint

logger = logging.getLogger(__name__)
PREFIX = "base_model.model."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
MAX_POLICY_ID = 200
RETRY_AFTER_S = 1.0


class AdapterShelf:
    """The adapters that the engine holds, at most `limit` and what fits into it; their versions stand in
    `ServerState.versions`."""

    def __init__(self, engine: Engine, state: ServerState, runs: RunRegistry, *, limit: int) -> None:
        self._engine, self._state, self._runs = engine, state, runs
        self._limit = min(limit, engine.capabilities.max_adapters or limit)

    @property
    def loaded(self) -> list[str]:
        """Policy ids, the one that was published the longest ago first."""
        return [policy_id for policy_id in self._state.versions if policy_id != BASE_POLICY]

    async def make_room(self, policy_id: str) -> None:
        """Drops the adapter that was published the longest ago and has no requests, when the shelf is full.

        Raises Overloaded when all have.
        """
        loaded = self.loaded
        if policy_id in loaded or len(loaded) < self._limit:
            return
        idle = next((p for p in loaded if not self._runs.ids_of(p)), None)
        if idle is None:
            raise Overloaded(
                f"{len(loaded)} adapters are loaded, the limit, and each has requests: let those of one end, or start "
                f"the server with room for more",
                retry_after_s=RETRY_AFTER_S,
            )
        await self.drop(idle)

    async def load(self, adapter: Adapter, tensors: Iterator[tuple[TensorLayout, memoryview]]) -> None:
        """The engine is paused. Whatever it raises, the policy is dropped then."""
        try:
            await self._engine.load_adapter(adapter, tensors)
        except BaseException:
            self._state.forget(adapter.policy_id)
            raise
        self._state.versions.pop(adapter.policy_id, None)  # published last, dropped last
        self._state.committed(adapter.version, adapter.policy_id)

    async def drop(self, policy_id: str) -> None:
        """No request uses it any more; later ones are NOT_FOUND."""
        self._state.forget(policy_id)
        await self._engine.drop_adapter(policy_id)
        logger.info("adapter %s is dropped", policy_id)

    async def drop_all(self) -> None:
        for policy_id in self.loaded:
            await self.drop(policy_id)


def adapter_of(manifest: Manifest) -> Adapter:
    """What the engine is told of an adapter manifest."""
    assert manifest.lora is not None
    lora = manifest.lora
    return Adapter(manifest.policy_id, manifest.target_version, lora.rank, lora.alpha, lora.target_modules)


def check_adapter(manifest: Manifest, model: ModelIdentity) -> None:
    """Raises InvalidRequest for an adapter at odds with itself, ModelMismatch for one of another model, naming each
    tensor that does not fit."""
    assert manifest.lora is not None
    lora = manifest.lora
    if not 0 < len(manifest.policy_id) <= MAX_POLICY_ID:
        raise InvalidRequest(f'an adapter needs a policy_id of 1 to {MAX_POLICY_ID} characters: "" is the base policy')
    if lora.rank < 1 or not (math.isfinite(lora.alpha) and lora.alpha > 0):
        raise InvalidRequest(f"rank is {lora.rank} and alpha {lora.alpha}: both must be above 0")
    if not lora.target_modules or "" in lora.target_modules:
        raise InvalidRequest("target_modules names no module: say how the adapted ones end, as in 'q_proj'")
    served = fingerprint(model.tensors)
    if lora.base_fingerprint != served:
        raise ModelMismatch(
            f"the adapter is for a model of fingerprint {lora.base_fingerprint!r}, this server's is {served!r}: "
            f"publish it where its base model is served"
        )
    wrong = _misfits([t.layout for t in manifest.tensors], lora.rank, lora.target_modules, model.tensors)
    if wrong:
        raise ModelMismatch(
            f"{len(wrong)} tensors of the adapter do not fit the served model: "
            f"{'; '.join(f'{name} {reason}' for name, reason in wrong[:3])}",
            violations=[(f"manifest.tensors[{name}]", reason) for name, reason in wrong],
        )


def _misfits(
    tensors: Sequence[TensorLayout], rank: int, targets: Sequence[str], model: Sequence[TensorLayout]
) -> list[tuple[str, str]]:
    """(name, what is wrong) of each tensor, or of a target module that has none."""
    weights = {t.name.removesuffix(".weight"): t.shape for t in model if len(t.shape) == 2}
    offered = {t.name: t for t in tensors}
    wrong, adapted = [], set()
    for t in tensors:
        end = next((e for e in (DOWN, UP) if t.name.endswith(e)), None)
        module = t.name.removeprefix(PREFIX).removesuffix(end or "")
        if end is None or not t.name.startswith(PREFIX):
            wrong.append((t.name, f"is not named {PREFIX}<module>{DOWN} or {UP}"))
        elif module not in weights:
            wrong.append((t.name, "adapts no matrix of the model"))
        elif not _is_target(module, targets):
            wrong.append((t.name, f"is of no target module ({', '.join(targets[:5])})"))
        elif PREFIX + module + (UP if end == DOWN else DOWN) not in offered:
            wrong.append((t.name, "has no second factor"))
        else:
            adapted.add(module)
            rows, columns = weights[module]
            expected = (rank, columns) if end == DOWN else (rows, rank)
            if t.shape != expected:
                wrong.append((t.name, f"has shape {list(t.shape)}, expected {list(expected)}"))
    idle = [target for target in targets if not any(_is_target(module, (target,)) for module in adapted)]
    return wrong + ([] if wrong else [(target, "is a target module without tensors") for target in idle])


def _is_target(module: str, targets: Sequence[str]) -> bool:
    return any(module == target or module.endswith("." + target) for target in targets)
