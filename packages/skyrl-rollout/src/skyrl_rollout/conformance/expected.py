"""How each item ends on the servers of this project; what differs from this table is a fault, or news."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from skyrl_rollout.conformance.item import NOT_OFFERED, PASSED, Outcome

# Kind of server -> number -> status, where that is not "passed". A machine without an accelerator has no memory of one
# to give back, so an engine offers no sleep there.
EXPECTED: Mapping[str, Mapping[int, str]] = {
    "reference": {},
    "engine-cpu": {46: NOT_OFFERED},
    "transformers": {46: NOT_OFFERED},
}


def expected_status(server: str, number: int) -> str:
    """Raises ValueError for a server that the table does not have."""
    if server not in EXPECTED:
        raise ValueError(f"nothing is known of the server {server!r}: there are {', '.join(sorted(EXPECTED))}")
    return EXPECTED[server].get(number, PASSED)


def unexpected(outcomes: Sequence[Outcome], server: str) -> list[str]:
    """A sentence for each item that ended otherwise."""
    return [
        f"item {o.item.number} is {o.status!r}, expected {wanted!r}: {o.reason or o.item.title}"
        for o in outcomes
        if o.status != (wanted := expected_status(server, o.item.number))
    ]
