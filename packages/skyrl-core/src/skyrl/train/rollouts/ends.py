"""Whether an answer can end before its limit: a model that names no token for it goes on until it is stopped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def without_end(cfg: Any, eos_token_ids: Iterable[int]) -> str | None:
    """What to tell the user where a server's model has no end-of-sequence token and no stop is configured, else None.

    Nothing else here needs such a token, and nothing needs one for padding: sequences are flat in the trainer.
    """
    sampling = cfg.generator.sampling_params
    if list(eos_token_ids) or sampling.stop or (sampling.additional_kwargs or {}).get("stop_token_ids"):
        return None
    return (
        f"the served model names no end-of-sequence token, so that every answer has the full "
        f"generator.sampling_params.max_generate_length={sampling.max_generate_length} tokens: add eos_token_id to its "
        f"generation_config.json or config.json, or set generator.sampling_params.stop"
    )
