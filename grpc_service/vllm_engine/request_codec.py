"""Translates VllmEngine's requests into the engine's values. Pure: no waiting, no state.

Rule 1: no set field is ignored, but for those that concern only the text that a gateway makes of
the tokens (``original_text``, ``spaces_between_special_tokens``). A field that cannot be served is
refused by name. Rule 2: ranges are checked by the engine's values, whose violations have the names
of triolet.v1. Rule 3: a plain proto3 number cannot be told from one that is not set. What its zero
means is said where it is read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine.core.text.types import Constraint
from engine.errors import InvalidRequest, Unsupported
from engine.requests.encode.values import EmbedRequest
from engine.requests.text.values import (
    GenerateRequest,
    OutputOptions,
    PromptOptions,
    SamplingParams,
)
from grpc_service.services.text_codec import ids_of

if TYPE_CHECKING:
    from google.protobuf.message import Message

# How long a request may take whose caller sets no deadline: the gateway never sets one, and gives
# up after this time (its --request-timeout-secs).
DEADLINE_S = 1800.0
UNSUPPORTED = (
    *("kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "extra_mm_inputs"),
    "media_refs",
)
CONSTRAINTS = {"json_schema": "json_schema", "regex": "regex", "grammar": "lark"}
CONSTRAINTS |= {"structural_tag": "structural_tag"}


def decode_generate(
    message: Any, model: str, max_model_len: int, timeout_s: float
) -> GenerateRequest:
    """Return the engine's request for ``model``, which takes ``max_model_len`` tokens. Its ranges
    are not checked yet.

    Raises:
        Unsupported: a field is set that this server does not support.
        InvalidRequest: there is no input, or a constraint that cannot be represented.
    """
    _refuse_unsupported(message)
    params, kind = message.sampling_params, message.WhichOneof("input")
    if kind is None:
        raise InvalidRequest.of("input", "set one of tokenized and text")
    return GenerateRequest(
        model=model,
        text=message.text if kind == "text" else None,
        token_ids=ids_of(message.tokenized.input_ids) if kind == "tokenized" else None,
        sampling=_decode_sampling(params),
        n=params.n or 1,
        request_id=message.request_id,
        constraint=_decode_constraint(params),
        prompt=_decode_truncation(params, max_model_len),
        output=OutputOptions(
            logprobs=_optional(params, "logprobs"),
            prompt_logprobs=_optional(params, "prompt_logprobs"),
            skip_special_tokens=params.skip_special_tokens,
        ),
        timeout_s=timeout_s,
        check=False,
    )


def decode_embed(message: Any, model: str, timeout_s: float) -> EmbedRequest:
    """Return the engine's request. Its ranges are not checked yet.

    Raises:
        InvalidRequest: there is no input.
    """
    if not message.HasField("tokenized"):
        raise InvalidRequest.of("tokenized", "is not set")
    return EmbedRequest(
        model=model,
        inputs=(ids_of(message.tokenized.input_ids),),
        request_id=message.request_id,
        timeout_s=timeout_s,
        check=False,
    )


def _refuse_unsupported(message: Any) -> None:
    names = [field.name for field, _ in message.ListFields() if field.name in UNSUPPORTED]
    if names:
        verb = "is" if len(names) == 1 else "are"
        raise Unsupported(f"{', '.join(names)} {verb} not supported", field=names[0])
    if message.data_parallel_rank:
        what = f"is {message.data_parallel_rank}, but the server has the rank 0 only"
        raise InvalidRequest.of("data_parallel_rank", what)


def _optional(message: Message, name: str) -> Any:
    return getattr(message, name) if message.HasField(name) else None


def _decode_sampling(params: Any) -> SamplingParams:
    """Return the sampling options. As in vLLM's own servicer, a zero of ``top_p`` and of
    ``repetition_penalty``, which would be out of range, counts as unset, and one of ``top_k`` and
    of ``min_p`` switches them off. A zero of the others changes nothing, and so counts as unset."""
    seed = _optional(params, "seed")
    return SamplingParams(
        temperature=_optional(params, "temperature"),
        top_p=params.top_p or None,
        top_k=params.top_k,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty or None,
        presence_penalty=params.presence_penalty or None,
        repetition_penalty=params.repetition_penalty or None,
        max_tokens=_optional(params, "max_tokens"),
        min_tokens=params.min_tokens or None,
        # A negative seed stands for the unsigned number of the same bits.
        seed=None if seed is None else seed % 2**64,
        ignore_eos=params.ignore_eos or None,
        stop=tuple(params.stop),
        stop_token_ids=ids_of(params.stop_token_ids),
        include_stop=params.include_stop_str_in_output or None,
        logit_bias=dict(sorted(params.logit_bias.items())),
    )


def _decode_truncation(params: Any, max_model_len: int) -> PromptOptions:
    """Return the options that keep the end of the prompt; -1 keeps as many tokens as leave
    room for one more."""
    kept = _optional(params, "truncate_prompt_tokens")
    if kept is None:
        return PromptOptions()
    if kept == -1:
        kept = max_model_len - 1
    return PromptOptions(truncate_to=kept, truncate_left=True)


def _decode_constraint(params: Any) -> Constraint | None:
    """Return the form, which begins behind the model's reasoning, unless the gateway has put rules
    for the reasoning into it."""
    made = _constraint_of(params)
    return None if made is None else replace(made, reasoning=not params.grammar_from_first_token)


def _constraint_of(params: Any) -> Constraint | None:
    kind = params.WhichOneof("constraint")
    if kind is None:
        return None
    if kind == "json_object":
        return Constraint("json_object", "") if params.json_object else None
    if kind == "choice":
        choices = tuple(params.choice.choices)
        if not choices or any("\0" in choice for choice in choices):
            what = "is empty, or holds a NUL"
            raise InvalidRequest.of("sampling_params.choice.choices", what)
        return Constraint("choice", "\0".join(choices))
    return Constraint(CONSTRAINTS[kind], getattr(params, kind))
