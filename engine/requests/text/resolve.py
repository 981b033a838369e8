"""Fills a Generate request's unset options from the model's generation_config, then from the usual
defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.core.text.types import Sampling, Stops

if TYPE_CHECKING:
    from engine.requests.text.values import OutputOptions, SamplingParams
    from engine.worker.text.interface import ModelInfo, SamplingDefaults

# The options for which a model's generation_config may have a value.
WITH_DEFAULTS = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


def resolve_sampling(
    params: SamplingParams,
    output: OutputOptions,
    defaults: SamplingDefaults,
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> Sampling:
    """Return the sampling of a request: unset fields come from the model's generation_config,
    then from `Sampling`. ``bad_words`` are the request's, as the tokenizer splits them.
    """
    chosen: dict[str, Any] = {}
    for name in WITH_DEFAULTS:
        value = getattr(params, name)
        value = getattr(defaults, name) if value is None else value
        if value is not None:
            chosen[name] = value
    return Sampling(
        **chosen,
        seed=params.seed,
        logit_bias=tuple(sorted(params.logit_bias.items())),
        allowed_token_ids=params.allowed_token_ids,
        banned_token_ids=params.banned_token_ids,
        bad_words=bad_words,
        logprobs=output.logprobs,
        prompt_logprobs=output.prompt_logprobs,
    )


def resolve_stops(
    params: SamplingParams, output: OutputOptions, info: ModelInfo, num_prompt: int
) -> Stops:
    """Return the stop conditions of a request whose prompt has ``num_prompt`` tokens.

    An unset ``max_tokens`` comes from the model's generation_config, but does not cut a request's
    own ``min_tokens``. Otherwise, and at most, it is the rest of the context.
    """
    room, least = info.max_model_len - num_prompt, params.min_tokens
    wanted = params.max_tokens
    if wanted is None and info.defaults.max_tokens is not None:
        wanted = max(info.defaults.max_tokens, least or 0)
    max_tokens = room if wanted is None else min(wanted, room)
    eos = frozenset() if params.ignore_eos else info.eos_token_ids
    return Stops(
        max_tokens=max_tokens,
        min_tokens=min(least if least is not None else info.defaults.min_tokens or 0, max_tokens),
        strings=params.stop,
        token_ids=eos | frozenset(params.stop_token_ids),
        include=bool(params.include_stop),
        skip_special=output.skip_special_tokens is not False,
    )
