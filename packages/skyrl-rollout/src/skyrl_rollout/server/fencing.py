"""Which trainer owns this server: the one with the highest epoch seen; pure."""

from __future__ import annotations

from skyrl_rollout.errors import Fenced, InvalidRequest

MAX_EPOCH = 1 << 62  # whoever claimed the last number of the field would leave none for a successor


class Fencing:
    """The highest trainer epoch seen by this instance, and its owner. Epochs start at 1."""

    def __init__(self) -> None:
        self.epoch = 0
        self.owner = ""

    def acquire(self, owner: str, claim: int | None) -> tuple[int, int, str]:
        """Mints an epoch above every one seen, or takes `claim`. Returns (epoch, previous epoch, previous owner).

        Claiming the epoch that one holds is a no-op; one that a call brought here first, before any claim, is held by
        who claims it. Raises Fenced for any other claim that is not above the highest.
        """
        previous = (self.epoch, self.owner)
        if claim is None:
            claim = self.epoch + 1
        elif not 1 <= claim <= MAX_EPOCH:
            raise InvalidRequest(f"claim_epoch must be 1 to {MAX_EPOCH}; leave it unset to be given one")
        elif claim == self.epoch and self.owner in ("", owner):
            self.owner = owner
            return (claim, *previous)
        elif claim <= self.epoch:
            raise self._fenced(claim)
        self.epoch, self.owner = claim, owner
        return (claim, *previous)

    def admit(self, epoch: int) -> bool:
        """Whether `epoch` is new here and takes over. Raises Fenced when a higher one was seen."""
        if epoch < 1:
            raise InvalidRequest(
                "fence.trainer_epoch is missing: call AcquireControl and put its epoch into every call"
            )
        if epoch > MAX_EPOCH:
            raise InvalidRequest(f"fence.trainer_epoch must be 1 to {MAX_EPOCH}: AcquireControl answers the one to use")
        if epoch < self.epoch:
            raise self._fenced(epoch)
        if epoch == self.epoch:
            return False
        self.epoch, self.owner = epoch, ""
        return True

    def _fenced(self, epoch: int) -> Fenced:
        holder = f" ({self.owner})" if self.owner else ""
        return Fenced(
            f"trainer epoch {epoch} is fenced: this server is owned by epoch {self.epoch}{holder}; stop this trainer, "
            f"or call AcquireControl to take over",
            details={"highest_epoch": str(self.epoch)},
        )
