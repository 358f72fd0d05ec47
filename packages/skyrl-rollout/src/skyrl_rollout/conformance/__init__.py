"""Does a server keep the rollout protocol? 54 items, checked over the wire against any endpoint.

`skyrl-rollout conformance grpc://host:port` prints the table; `pytest --rollout-url grpc://host:port --pyargs
skyrl_rollout.conformance` runs each item as a test. The suite publishes weights, pauses and cancels: give it a server
that nobody trains with.
"""

from skyrl_rollout.conformance.item import Item, Outcome
from skyrl_rollout.conformance.launching import Launcher
from skyrl_rollout.conformance.suite import Plan, connected, run
from skyrl_rollout.conformance.table import ITEMS

__all__ = ["ITEMS", "Item", "Launcher", "Outcome", "Plan", "connected", "run"]
