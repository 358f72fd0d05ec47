"""The FSDP backend under the policy contract, on one rank in this process and on two under Ray."""

from __future__ import annotations

import pytest
from skyrl.train.policy.contract_suite import PolicyContract
from skyrl.train.policy.fsdp.plugin import PLUGIN


class TestFsdpOnOneRank(PolicyContract):
    plugin = PLUGIN


@pytest.mark.ci
class TestFsdpOnTwoRanks(PolicyContract):
    plugin = PLUGIN
    num_workers = 2
