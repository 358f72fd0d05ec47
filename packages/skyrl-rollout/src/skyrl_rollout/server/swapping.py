"""How the content of a sealed update becomes what the engine serves: every tensor, changes over them, or an adapter."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from skyrl_rollout.errors import VersionConflict, WrongState
from skyrl_rollout.server.adapters import AdapterShelf, adapter_of
from skyrl_rollout.server.collectives import Collective
from skyrl_rollout.server.deltas import HostCopy, scratch_nbytes
from skyrl_rollout.server.engine import Engine
from skyrl_rollout.server.options import ServerOptions
from skyrl_rollout.server.staging import (
    CopiedStaging,
    InlineStaging,
    MappedStaging,
    OwnStaging,
    Staging,
    tensors,
    verify,
)
from skyrl_rollout.server.staging_memory import StagingMemory, need_memory
from skyrl_rollout.server.state import BASE_POLICY, ServerState
from skyrl_rollout.server.updates import Update
from skyrl_rollout.weights.file import open_shard
from skyrl_rollout.weights.manifest import Manifest
from skyrl_rollout.weights.shm import open_segment


class Swapper:
    """The live weights of one engine: base, adapters, and with `--delta` a copy of the base in host memory."""

    def __init__(self, engine: Engine, state: ServerState, adapters: AdapterShelf, options: ServerOptions) -> None:
        self.adapters = adapters
        self._engine, self._state = engine, state
        self._host_copy = HostCopy() if options.delta else None
        self._memory, self._update_root = StagingMemory(), options.update_root
        self._leaving: asyncio.Task[None] | None = None
        self._swaps: dict[str, Callable[[Update, Staging], Awaitable[None]]] = {
            "full": self._swap_full,
            "overwrite": self._swap_overwrite,
            "lora": self._swap_lora,
        }

    def check(self, update: Update) -> None:
        """Raises WrongState or VersionConflict when the server's weights are not such that this update can follow."""
        manifest = update.manifest
        if manifest.kind != "full" and self._state.weights_lost:
            raise WrongState("the weights were discarded: publish every tensor before a delta or an adapter")
        if manifest.kind == "overwrite":
            current = self._state.weight_version
            if not manifest.base_version or not current:
                raise WrongState("version 0 was never published, so nothing can change over it: publish in full first")
            if manifest.base_version != current:
                raise VersionConflict(
                    f"the delta is over version {manifest.base_version}, version {current} is committed: publish in "
                    f"full, or a delta over {current}",
                    details={"current_version": str(current)},
                )
            self._need_copy().need()

    def stage(self, update: Update) -> Staging:
        """Where the bytes of the update will wait. Raises StagingFull before any moves."""
        manifest, transfer = update.manifest, update.transfer
        if transfer is not None:
            return Collective(self._engine, transfer, [t.layout for t in manifest.tensors], self._leaving)
        beside = self._engine.extra_nbytes(self._loaded_nbytes(manifest))
        if manifest.kind == "overwrite":
            need_memory(sum(manifest.shard_nbytes().values()) + scratch_nbytes(manifest))
        if update.transport == "inline":
            return InlineStaging(manifest, self._memory, beside=beside)
        if update.transport == "file":
            root = self._update_root
            assert root is not None
            return CopiedStaging(
                manifest,
                self._memory,
                lambda shard, nbytes: open_shard(root, update.folder, shard, nbytes),
                beside=beside,
            )
        if self._host_copy is not None and manifest.kind == "full":
            return CopiedStaging(
                manifest,
                self._memory,
                lambda shard, nbytes: open_segment(update.segments[shard], nbytes),
                beside=beside,
            )
        need_memory(beside)
        return MappedStaging(manifest, update.segments)

    def _loaded_nbytes(self, manifest: Manifest) -> int:
        """What the engine is handed at the commit; after a delta that is every tensor."""
        if manifest.kind == "lora":
            return sum(t.nbytes for t in manifest.tensors)
        return sum(t.nbytes for t in self._engine.identity.tensors)

    def verify(self, update: Update, staging: Staging) -> None:
        """Raises CorruptBytes, or ValueError for a delta that is none. Slow: run it in a thread."""
        if isinstance(staging, Collective):
            staging.need_joined()
        elif update.manifest.kind == "overwrite":
            self._need_copy().verify(staging, update.manifest)
        else:
            verify(staging, update.manifest)

    async def swap(self, update: Update, staging: Staging) -> bool:
        """The engine is paused. Returns whether it keeps the staged memory. What it raises leaves the live weights, or
        the adapter, undefined."""
        await self._swaps[update.manifest.kind](update, staging)
        return self._keep(update, staging)

    def close(self, staging: Staging) -> None:
        """The staged bytes are not needed any more."""
        staging.close()
        if isinstance(staging, Collective):
            self._leaving = staging.leaving

    def release_memory(self) -> None:
        """What is kept for the next update goes: none may come."""
        self._memory.release()

    async def _swap_full(self, update: Update, staging: Staging) -> None:
        if isinstance(staging, Collective):
            await staging.receive(update.lease_s)
        else:
            await self._engine.load_weights(tensors(staging, update.manifest))
        await self._base_is(update)

    async def _swap_overwrite(self, update: Update, staging: Staging) -> None:
        copy = self._need_copy()
        await asyncio.to_thread(copy.apply, staging, update.manifest)
        await self._engine.load_weights(copy.tensors())
        await self._base_is(update)

    async def _swap_lora(self, update: Update, staging: Staging) -> None:
        await self.adapters.load(adapter_of(update.manifest), tensors(staging, update.manifest))

    async def _base_is(self, update: Update) -> None:
        await self.adapters.drop_all()
        self._state.weights_lost = False
        self._state.committed(update.manifest.target_version, BASE_POLICY)

    def _keep(self, update: Update, staging: Staging) -> bool:
        copy, kind = self._host_copy, update.manifest.kind
        if copy is None or kind != "full":
            return False
        if isinstance(staging, OwnStaging):
            copy.adopt(staging, update.manifest)
            return True
        copy.drop()  # received by the engine itself: nobody here has seen the bytes
        return False

    def _need_copy(self) -> HostCopy:
        assert self._host_copy is not None, "a delta is refused where the capability is not offered"
        return self._host_copy
