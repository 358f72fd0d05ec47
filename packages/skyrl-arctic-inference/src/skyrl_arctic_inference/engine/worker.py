"""Everything that the front calls inside vLLM's workers, as the one class that vLLM mixes into its own worker."""

from __future__ import annotations

from skyrl_arctic_inference.engine.adapters_extension import AdaptersExtension
from skyrl_arctic_inference.engine.cut_prompts import hold_generators_of_cut_prompts
from skyrl_arctic_inference.engine.draws import draw_once_per_row
from skyrl_arctic_inference.engine.given_logprobs import GivenLogprobs
from skyrl_arctic_inference.engine.transfers_extension import TransfersExtension
from skyrl_arctic_inference.engine.weights_extension import WeightsExtension

hold_generators_of_cut_prompts()
draw_once_per_row()


class WorkerExtension(WeightsExtension, AdaptersExtension, TransfersExtension, GivenLogprobs):
    """See its bases."""
