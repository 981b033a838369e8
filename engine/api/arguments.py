"""Converts the arguments of an engine's and its handles' methods to requests and options.

Rule: the three façades (Trio, blocking, asyncio) accept the same types, and refuse other types with
the same errors, before a request begins.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine.errors import InvalidRequest
from engine.requests.encode.classify_values import ClassifyRequest
from engine.requests.encode.values import EmbedRequest, RerankRequest
from engine.requests.field_types import options, wrong_type
from engine.requests.image_generation.values import DrawRequest
from engine.requests.text.values import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SAMPLING = options(SamplingParams)
# By call: the request's class, its field for a plain text, and a hint for errors.
CALLS: dict[str, tuple[type[Any], str, str]] = {
    "generate": (GenerateRequest, "text", ""),
    "embed": (EmbedRequest, "", ", which has the inputs"),
    "rerank": (RerankRequest, "", ", which has query and documents"),
    "classify": (ClassifyRequest, "", ", which has the inputs"),
    "draw": (DrawRequest, "prompt", ""),
}


def sampling_of(given: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
    """Return sampling options, given as an object or as a mapping of its fields.

    Raises:
        TypeError: ``given`` is neither, or names an unknown field.
    """
    if isinstance(given, SamplingParams):
        return given
    sampling: SamplingParams = _SAMPLING.convert("sampling", given)
    return sampling


def require_list(name: str, texts: Sequence[str | bytes]) -> None:
    """Check that an argument is a list of texts or images, and not a single one, whose characters
    or bytes would be taken for a list."""
    if isinstance(texts, str):
        raise TypeError(f"{name} takes a list of texts; for one text, give [text]")
    if isinstance(texts, bytes):
        raise TypeError(f"{name} takes a list; for one image, give [image]")


def request_of(call: str, given: Any) -> Any:
    """Return the request of a call of `CALLS`, which may be given as a text if that says so.

    Raises:
        TypeError: ``given`` is of another type.
    """
    kind, text_field, hint = CALLS[call]
    if isinstance(given, kind):
        return given
    if text_field and isinstance(given, str):
        return kind(**{text_field: given})
    text = "a text or " if text_field else ""
    raise wrong_type(call, f"{text}an engine.{kind.__name__}{hint}", given)


def completion_request(given: GenerateRequest | str, sampling: dict[str, Any]) -> GenerateRequest:
    """Return the request of a call of ``complete``, whose ``sampling`` overrides the request's.

    Raises:
        TypeError: The request is of another type, or there is no such sampling option.
        InvalidRequest: An option is out of range, or the request has several choices.
    """
    request: GenerateRequest = request_of("generate", given)
    if request.n not in (None, 1):
        raise InvalidRequest.of("n", f"is {request.n}, but complete returns one text; use generate")
    if not sampling:
        return request
    _SAMPLING.convert("complete", sampling)  # raises a TypeError that names the fields
    return replace(request, sampling=replace(request.sampling, **sampling))
