"""The server under test as a check sees it: who it is, what it offers, and requests that any server can take."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_rollout import wire
from skyrl_rollout.conformance import made_weights
from skyrl_rollout.conformance.answers import Answer, Reading
from skyrl_rollout.conformance.item import Failed, NotOffered, NotRun
from skyrl_rollout.conformance.launching import LaunchedServer, Launcher
from skyrl_rollout.conformance.stubs import Stubs
from skyrl_rollout.conformance.trainer import Draft, Trainer, draft
from skyrl_rollout.security import ANONYMOUS, Credentials
from skyrl_rollout.v1 import control_pb2
from skyrl_rollout.v1 import generation_pb2 as pb
from skyrl_rollout.weights.manifest import TensorLayout

PACE = "token_delay_s"  # a server with this backend option lets a check choose its pace; others get longer work
OWNER = "conformance"
QUIET_S = 20.0
LONGER = 4  # times, where a server has no such option


class Target:
    """One connected server. server: the process, where the suite launched it. rollout_token: one of the lesser role.

    full_length: no check is shortened.
    """

    def __init__(
        self,
        url: str,
        stubs: Stubs,
        info: control_pb2.GetServerInfoResponse,
        *,
        credentials: Credentials = ANONYMOUS,
        rollout_token: str | None = None,
        launcher: Launcher | None = None,
        server: LaunchedServer | None = None,
        model: Path | None = None,
        full_length: bool = False,
    ) -> None:
        self.url, self.stubs, self.info, self.model = url, stubs, info, model
        self.credentials, self.rollout_token = credentials, rollout_token
        self.launcher, self.server, self.full_length = launcher, server, full_length
        self.layout: tuple[TensorLayout, ...] = tuple(wire.layout_from_pb(t) for t in info.model.tensors)
        self.shared: dict[str, Any] = {}  # what one check leaves for another

    @property
    def vocab_size(self) -> int:
        return self.info.model.vocab_size

    @property
    def context(self) -> int:
        return self.info.model.max_context

    @property
    def tolerance(self) -> float:
        """By how much two ways to compute one logprob may differ."""
        return 2e-3 if self.layout[0].dtype == "f32" else 0.15

    def offers(self, capability: str) -> bool:
        """Whether Capabilities (or a limit) lists it: "score", "transports:shm", "max_top_logprobs"."""
        name, _, member = capability.partition(":")
        if name == "max_top_logprobs":
            return self.info.limits.max_top_logprobs > 0
        value = getattr(self.info.capabilities, name)
        return bool(value) if not member else _number(name, member) in value

    def need(self, capability: str) -> None:
        """Raises NotOffered."""
        if not self.offers(capability):
            raise NotOffered(capability)

    def opened(self, **options: Any) -> Stubs:
        """A connection of its own, with the same credentials."""
        return Stubs(self.url, self.credentials, **options)

    def prompt(self, length: int = 8, seed: int = 1) -> np.ndarray:
        """int32 [length] of ordinary tokens: neither an end token nor one of the first four."""
        allowed = np.setdiff1d(np.arange(min(4, self.vocab_size - 1), self.vocab_size), self.info.model.eos_token_ids)
        return np.random.default_rng(seed).choice(allowed, length).astype("<i4")

    def ask(
        self,
        max_tokens: int | None = 16,
        *,
        prompt: np.ndarray | None = None,
        pace_s: float = 0.0,
        sampling: Mapping[str, Any] | None = None,
        mode: int = pb.LOGPROB_MODE_RAW,
        top: int = 0,
        **fields: Any,
    ) -> pb.GenerateRequest:
        """A greedy request that meets no end token, unless `sampling` says otherwise; one event per token."""
        params: dict[str, Any] = {"ignore_eos": True, "temperature": 0.0, **(sampling or {})}
        if max_tokens is not None:
            params["max_tokens"] = max_tokens
        given: dict[str, Any] = {
            "request_id": str(uuid.uuid4()),
            "prompt_token_ids": (self.prompt() if prompt is None else prompt).astype("<i4").tobytes(),
            "stream": pb.StreamOptions(min_tokens_per_event=1),
        } | fields
        request = pb.GenerateRequest(sampling=pb.SamplingParams(**params), **given)
        request.logprobs.mode = mode  # type: ignore[assignment]
        if top:
            request.logprobs.top_k = top
        if pace_s and PACE in self.info.capabilities.backend_options:
            request.backend_options[PACE] = pace_s
        return request

    def lasting(self, num_tokens: int) -> int:
        """So many tokens where a check can set the pace, more where it cannot: the work must outlast its next call."""
        paced = PACE in self.info.capabilities.backend_options
        return num_tokens if paced else min(LONGER * num_tokens, self.context // 2)

    def ask_long(self, *, pace_s: float = 0.01, **fields: Any) -> pb.GenerateRequest:
        """Work that goes on for seconds: as many tokens as the context holds."""
        return self.ask(None, pace_s=pace_s, **fields)

    def read(self, request: pb.GenerateRequest, *, timeout_s: float = 60.0, stubs: Stubs | None = None) -> Reading:
        """Starts the call; nothing is read yet."""
        return Reading((stubs or self.stubs).rollout.Generate(request, timeout=timeout_s))

    async def answer(self, request: pb.GenerateRequest, timeout_s: float = 60.0) -> Answer:
        """The whole answer."""
        return await self.read(request, timeout_s=timeout_s).rest(timeout_s)

    async def trainer(self) -> Trainer:
        """A new owner of the server, which ends whatever the last one held."""
        reply = await self.stubs.engine.AcquireControl(control_pb2.AcquireControlRequest(owner=OWNER))
        return Trainer(self.stubs, reply.trainer_epoch, self.info.limits.max_chunk_bytes or 256 * 1024)

    def noise(self, version: int, seed: int | None = None) -> Draft:
        """A full update with weights that look like nothing else."""
        return draft(version, made_weights.noise(self.layout, version if seed is None else seed), self.layout)

    def saying(self, version: int, token: int) -> Draft:
        """A full update under which the server says nothing but `token`."""
        return draft(version, made_weights.saying(self.layout, token, self.vocab_size), self.layout)

    async def settle(self) -> None:
        """Ends what a check left behind. Raises Failed where the server does not come to rest."""
        await self.trainer()
        await self.stubs.rollout.AbortGenerations(pb.AbortGenerationsRequest(all=True, reason="end of a check"))
        await self.quiet(QUIET_S)

    async def quiet(self, within_s: float) -> float:
        """Seconds until no request is running, waiting or frozen. Raises Failed where that takes longer."""
        began = time.monotonic()
        while True:
            status = await self.stubs.status()
            if not (status.running or status.waiting or status.frozen):
                return time.monotonic() - began
            if time.monotonic() - began > within_s:
                raise Failed(
                    f"{status.running} requests run, {status.waiting} wait and {status.frozen} are frozen after "
                    f"{within_s:g} s, expected none"
                )
            await asyncio.sleep(0.05)

    def need_launcher(self) -> Launcher:
        """Raises NotRun."""
        if self.launcher is None:
            raise NotRun("launcher")
        return self.launcher

    async def victim(self) -> LaunchedServer:
        """A launched server that may be killed: the one under test where the suite launched it, else another."""
        launcher = self.need_launcher()
        found: LaunchedServer | None = self.server or self.shared.get("victim")
        if found is None:
            found = self.shared["victim"] = LaunchedServer(launcher)
        if not found.is_alive:
            await found.start()
        return found


def _number(name: str, member: str) -> object:
    tables: Mapping[str, Mapping[str, object]] = {
        "pause_modes": wire.PAUSE_MODES, "kv_policies": wire.KV_POLICIES, "extras": wire.EXTRAS,
    }  # fmt: skip
    return tables[name][member] if name in tables else member
