"""How rollouts are made (`generator.*`): samples per prompt, turns, sampling, chat template."""

from __future__ import annotations

from typing import Any, Literal

from skyrl.train.config.inference_engine import InferenceEngineConfig
from skyrl.train.config.part import ConfigPart, Texts, key, section


class SamplingParams(ConfigPart):
    """`generator.sampling_params.*`."""

    max_generate_length: int = key(1024, "Tokens per turn at most.", ge=1)
    temperature: float = key(1.0, "0 is greedy.", ge=0)
    top_p: float = key(1.0, "Nucleus sampling.", gt=0, le=1)
    min_p: float = key(0.0, "Tokens below this share of the likeliest one are dropped.", ge=0, le=1)
    top_k: int = key(-1, "-1 or 0: all tokens.", ge=-1)
    repetition_penalty: float = key(1.0, "1 is none. Sent to the server (public SkyRL accepts and drops it).", gt=0)
    logprobs: int | None = key(1, "Sampled-token logprobs; None, 0 and 1 are the same here: they always come.")
    stop: Texts | None = key(None, "Texts that end a turn.")
    additional_kwargs: dict[str, Any] | None = key(None, "Further fields of skyrl_rollout.tokens.Sampling, by name.")


class EvalSamplingParams(SamplingParams):
    """`generator.eval_sampling_params.*`; a key that is not set keeps the default of evaluation."""

    temperature: float = key(0.0, "0 is greedy, also when other keys of this section are set.", theirs=(
        "0.0 if the section is unset, 1.0 once any of its keys is set"), reason=(
        "setting top_p must not change the temperature"), ge=0)  # fmt: skip
    max_generate_length: int = key(0, "Tokens per turn at most; unset means the training value.", theirs=(
        "the training value if the section is unset, 1024 once any of its keys is set"), ours=(
        "the training value"), reason="setting top_p must not change the length", ge=0)  # fmt: skip


class ChatTemplateConfig(ConfigPart):
    """`generator.chat_template.*`."""

    source: Literal["name", "file"] = key("name", "Whether name_or_path names a known template or a file.")
    name_or_path: str | None = key(None, "Chat template instead of the tokenizer's own.")


class GeneratorConfig(ConfigPart):
    """`generator.*`."""

    n_samples_per_prompt: int = key(5, "Samples per training prompt: the size of a group.", ge=1)
    eval_n_samples_per_prompt: int = key(1, "Samples per evaluation prompt.", ge=1)
    sampling_params: SamplingParams = section(SamplingParams)
    eval_sampling_params: EvalSamplingParams = section(EvalSamplingParams)
    max_turns: int = key(1, "Turns of an episode at most.", ge=1)
    max_input_length: int | None = key(
        None,
        "Tokens in the context at the start of a turn at most; unset means trainer.max_prompt_length.",
        gt=0,
    )
    batched: bool = key(
        False,
        "Public switch between two generators; here every value takes the one path.",
    )
    chat_template: ChatTemplateConfig = section(ChatTemplateConfig)
    chat_template_kwargs: dict[str, Any] = key({}, "Arguments of the chat template, e.g. {enable_thinking: false}.")
    use_conversation_multi_turn: bool = key(True, "Observations are messages of their own turn.")
    append_eos_token_after_stop_str_in_multi_turn: bool = key(True, "Close a turn that ended at a stop text.")
    step_wise_trajectories: bool = key(False, "Each turn of an episode is a sample of its own, after all before it.")
    merge_stepwise_output: bool = key(
        False, "step_wise_trajectories: turns of which each continues the tokens of the one before become one sample."
    )
    zero_reward_on_non_stop: bool = key(False, "Reward 0 for rollouts that did not end by themselves.")
    use_cache_salt: bool = key(True, "Separate the server's caches by weight version; it always does here.")
    vision_language_generator: bool = key(False, "Prompts with images; only false is possible here.")
    apply_overlong_filtering: bool = key(False, "Mask rollouts that did not end by themselves.")
    inference_engine: InferenceEngineConfig = section(InferenceEngineConfig)
