"""RolloutService: streams of tokens, and logprobs of given ones, to many callers."""

from __future__ import annotations

import logging

import grpc.aio

from skyrl_rollout.server import convert
from skyrl_rollout.server.answers import answered
from skyrl_rollout.server.registry import RunRegistry
from skyrl_rollout.server.scoring import Scorer
from skyrl_rollout.v1 import generation_pb2 as pb
from skyrl_rollout.v1 import generation_pb2_grpc

logger = logging.getLogger(__name__)
DEADLINE_SLACK_S = 0.02  # a call is cancelled a moment before or after its last millisecond


class RolloutService(generation_pb2_grpc.RolloutServiceServicer):
    """Generate and AbortGenerations over the runs of one server, and Score beside them."""

    def __init__(self, runs: RunRegistry, scorer: Scorer) -> None:
        self._runs, self._scorer = runs, scorer

    @answered
    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        run, resume_after = self._runs.attach(convert.generation_request(request), request.resume_after)
        try:
            async for seq, event in run.follow(resume_after):
                await context.write(convert.generate_response(seq, event))
        finally:
            left_s = context.time_remaining()
            self._runs.detach(run, deadline_passed=left_s is not None and left_s <= DEADLINE_SLACK_S)

    @answered
    async def Score(self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext) -> None:
        asked = convert.scoring_request(request)
        for chunk in self._scorer.chunks(asked, await self._scorer.score(asked)):
            await context.write(convert.score_response(chunk))

    @answered
    async def AbortGenerations(
        self, request: pb.AbortGenerationsRequest, context: grpc.aio.ServicerContext
    ) -> pb.AbortGenerationsResponse:
        aborted, not_found = await self._runs.abort(self._runs.active_ids() if request.all else request.request_ids)
        logger.info("%d requests aborted: %s", len(aborted), request.reason or "no reason given")
        return pb.AbortGenerationsResponse(aborted=aborted, not_found=not_found)
