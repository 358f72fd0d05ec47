"""The FSDP backend under the policy contract, on one rank in this process and on two under Ray."""

from __future__ import annotations

import pytest
from skyrl.train.policy.contract_suite import PolicyContract
from skyrl.train.policy.critic_suite import CriticContract
from skyrl.train.policy.fsdp.plugin import PLUGIN


class TestFsdpOnOneRank(PolicyContract):
    plugin = PLUGIN


class TestFsdpCriticOnOneRank(CriticContract):
    plugin = PLUGIN


@pytest.mark.ci
@pytest.mark.timeout(400)  # processes that start beside others
class TestFsdpOnTwoRanks(PolicyContract):
    plugin = PLUGIN
    num_workers = 2
    # every test starts processes of its own; left out is what other tests of this class imply or ranks cannot change
    test_logprobs_equal_the_plain_reference_in_the_order_of_the_batch_in_float32 = None
    test_gradients_equal_the_plain_reference_in_float32 = None
    test_gradients_of_the_regular_loss_equal_the_plain_reference_in_float64 = None
    test_weights_after_five_steps_equal_the_plain_reference_in_float64 = None
    test_the_gradient_does_not_depend_on_the_size_of_micro_batches = None
    test_a_loss_that_chooses_tokens_chooses_them_over_the_whole_minibatch = None
    test_the_learning_rate_warms_up_over_optimizer_steps = None
    test_loading_from_a_folder_without_a_checkpoint_names_the_missing_file = None
    test_an_untied_head_is_exported_under_its_own_name = None


@pytest.mark.long
@pytest.mark.timeout(400)
class TestFsdpCriticOnTwoRanks(CriticContract):
    plugin = PLUGIN
    num_workers = 2
    # every test starts processes of its own; left out is what other tests of this file imply
    test_values_and_gradients_equal_the_plain_reference_for_any_micro_batches = None
    test_a_critics_gradient_that_is_not_finite_changes_nothing_and_is_counted = None
    test_an_exported_critic_is_a_model_that_a_critic_starts_from = None
    test_a_rank_without_sequences_takes_part_in_the_critics_step = None
    test_a_resumed_critic_continues_bit_for_bit = None
