"""Two parts of one sample, made by two servers, as one sample: tokens, logprobs and versions to the token; pure."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from skyrl_rollout.columns import joined_extras, joined_top
from skyrl_rollout.tokens import FinishReason, Sample, Sampling, VersionSpan


def spliced(first: Sample | None, second: Sample) -> Sample:
    """`second` continues `first` (None: nothing was made before): its end is the sample's end."""
    if first is None:
        return second
    made = len(first.token_ids)
    spans = list(first.spans)
    for span in second.spans:
        last = spans[-1] if spans else None
        if last and (last.weight_version, last.oldest_kv_version) == (span.weight_version, span.oldest_kv_version):
            spans[-1] = replace(last, length=last.length + span.length)
        else:
            spans.append(VersionSpan(made + span.start, span.length, span.weight_version, span.oldest_kv_version))
    return replace(
        second,
        token_ids=np.concatenate([first.token_ids, second.token_ids]),
        logprobs=np.concatenate([first.logprobs, second.logprobs]),
        weight_versions=np.concatenate([first.weight_versions, second.weight_versions]),
        spans=tuple(spans),
        top=joined_top([first.top, second.top]) if len(second.token_ids) else first.top,
        extras=joined_extras([first.extras, second.extras]) if len(second.token_ids) else first.extras,
        invalid_logprobs=first.invalid_logprobs + second.invalid_logprobs,
        num_preemptions=first.num_preemptions + second.num_preemptions,
        instance_ids=tuple(dict.fromkeys((*first.instance_ids, *second.instance_ids))),
    )


def ended(sample: Sample, sampling: Sampling, eos_token_ids: tuple[int, ...]) -> Sample | None:
    """The sample with its finish reason where its last token ended it and only the word about it was lost, else None.

    sampling: with every default filled in, as the server answered.
    """
    if not len(sample.token_ids):
        return None
    last = int(sample.token_ids[-1])
    if last in sampling.stop_token_ids:
        return replace(sample, finish_reason=FinishReason.STOP_TOKEN, stop_match=last)
    if last in eos_token_ids and not sampling.ignore_eos:
        return replace(sample, finish_reason=FinishReason.EOS)
    if sampling.max_tokens is not None and len(sample.token_ids) >= sampling.max_tokens:
        return replace(sample, finish_reason=FinishReason.LENGTH)
    return None
