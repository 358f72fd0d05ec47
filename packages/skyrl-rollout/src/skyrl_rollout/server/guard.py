"""Who may give orders: every control call passes here; who takes over releases what the last trainer held."""

from __future__ import annotations

from skyrl_rollout.errors import InvalidRequest
from skyrl_rollout.server.committing import Updater
from skyrl_rollout.server.fencing import Fencing
from skyrl_rollout.server.operations import OperationBook
from skyrl_rollout.server.pausing import Pauser
from skyrl_rollout.v1 import control_pb2

MAX_NAME = 200  # characters of an owner or an op_id: both are remembered


class Guard:
    """Fencing with its consequences: the open update of a fenced trainer is aborted and its pause ended."""

    def __init__(self, operations: OperationBook, pauser: Pauser, updater: Updater) -> None:
        self.fencing = Fencing()
        self._operations, self._pauser, self._updater = operations, pauser, updater

    async def acquire(self, owner: str, claim: int | None) -> tuple[int, int, str]:
        """(epoch, previous epoch, previous owner). Raises Fenced for a claim that is too low."""
        if len(owner) > MAX_NAME:
            raise InvalidRequest(f"owner has {len(owner)} characters, at most {MAX_NAME} are kept")
        epoch, previous, previous_owner = self.fencing.acquire(owner, claim)
        if epoch != previous:
            await self._release_all()
        return epoch, previous, previous_owner

    async def admit(self, fence: control_pb2.Fence, *, needs_op_id: bool = False) -> None:
        """Raises Fenced for an epoch below the highest; a higher one takes over."""
        if len(fence.op_id) > MAX_NAME or (needs_op_id and not fence.op_id):
            raise InvalidRequest(
                f"fence.op_id must have 1 to {MAX_NAME} characters: mint a UUID per operation, so that a retry is "
                f"not a second one"
            )
        if self.fencing.admit(fence.trainer_epoch):
            await self._release_all()

    async def _release_all(self) -> None:
        self._operations.call_off()
        self._updater.abort_live()
        await self._pauser.release()
