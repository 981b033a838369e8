"""Fills a Generate request's unset options from the model's generation_config, then from the usual
defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.core.text.types import Sampling, Stops

if TYPE_CHECKING:
    from engine.requests.text.values import OutputOptions, SamplingParams
    from engine.worker.text.interface import ModelInfo, SamplingDefaults


def resolve_sampling(
    params: SamplingParams,
    output: OutputOptions,
    defaults: SamplingDefaults,
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> Sampling:
    """Return the sampling of a request: unset fields come from the model's generation_config,
    then from the usual defaults. ``bad_words`` are the request's, as the tokenizer splits them.
    """

    def pick(name: str, usual: float) -> Any:
        asked = getattr(params, name)
        if asked is not None:
            return asked
        configured = getattr(defaults, name, None)
        return usual if configured is None else configured

    return Sampling(
        temperature=pick("temperature", 1.0),
        top_k=pick("top_k", 0),
        top_p=pick("top_p", 1.0),
        min_p=pick("min_p", 0.0),
        typical_p=pick("typical_p", 1.0),
        repetition_penalty=pick("repetition_penalty", 1.0),
        presence_penalty=pick("presence_penalty", 0.0),
        frequency_penalty=pick("frequency_penalty", 0.0),
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
    own ``min_tokens``. It is the rest of the context if there is none, or if it is larger.
    """
    room, asked = info.max_model_len - num_prompt, params.min_tokens
    wanted = params.max_tokens
    if wanted is None and info.defaults.max_tokens is not None:
        wanted = max(info.defaults.max_tokens, asked or 0)
    max_tokens = room if wanted is None else min(wanted, room)
    eos = frozenset() if params.ignore_eos else info.eos_token_ids
    return Stops(
        max_tokens=max_tokens,
        min_tokens=min(asked if asked is not None else info.defaults.min_tokens or 0, max_tokens),
        strings=params.stop,
        token_ids=eos | frozenset(params.stop_token_ids),
        include=bool(params.include_stop),
        skip_special=output.skip_special_tokens is not False,
    )
