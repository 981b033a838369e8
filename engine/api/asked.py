"""What a program hands to the methods of an engine and its handles, as requests and options.

Rule: the three façades (Trio, blocking, asyncio) take the same things, and refuse others alike,
before anything has begun.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine.errors import InvalidRequest
from engine.requests.draw_values import DrawRequest
from engine.requests.encode_values import EmbedRequest, RerankRequest
from engine.requests.field_types import options, wrong_type
from engine.requests.text_values import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SAMPLING = options(SamplingParams)


def sampling_of(given: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
    """Return the sampling options that an object, or a mapping of its fields, stands for.

    Raises:
        TypeError: it is neither, or there is no such field.
    """
    if isinstance(given, SamplingParams):
        return given
    sampling: SamplingParams = _SAMPLING.convert("sampling", given)
    return sampling


def require_list(name: str, texts: Sequence[str | bytes]) -> None:
    """Check that an argument is several texts or images, and not one, whose characters or bytes
    would be taken for them."""
    if isinstance(texts, str):
        raise TypeError(f"{name} takes a list of texts; for one text, give [text]")
    if isinstance(texts, bytes):
        raise TypeError(f"{name} takes a list; for one image, give [image]")


def generate_request(asked: GenerateRequest | str) -> GenerateRequest:
    """Return the request of a call of ``generate``; a text is a prompt.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(asked, str):
        return GenerateRequest(text=asked)
    if not isinstance(asked, GenerateRequest):
        raise wrong_type("generate", "a text or an engine.GenerateRequest", asked)
    return asked


def embed_request(asked: EmbedRequest) -> EmbedRequest:
    """Return the request of a call of ``embed``. Raises TypeError if it is something else."""
    if not isinstance(asked, EmbedRequest):
        raise wrong_type("embed", "an engine.EmbedRequest, which has the inputs", asked)
    return asked


def rerank_request(asked: RerankRequest) -> RerankRequest:
    """Return the request of a call of ``rerank``. Raises TypeError if it is something else."""
    if not isinstance(asked, RerankRequest):
        raise wrong_type("rerank", "an engine.RerankRequest, which has query and documents", asked)
    return asked


def draw_request(asked: DrawRequest | str) -> DrawRequest:
    """Return the request of a call of ``draw``; a text is a prompt.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(asked, str):
        return DrawRequest(prompt=asked)
    if not isinstance(asked, DrawRequest):
        raise wrong_type("draw", "a text or an engine.DrawRequest", asked)
    return asked


def completion_request(asked: GenerateRequest | str, sampling: dict[str, Any]) -> GenerateRequest:
    """Return the request of a call of ``complete``, whose ``sampling`` overrides the request's.

    Raises:
        TypeError: as `generate_request`, or there is no such sampling option.
        InvalidRequest: an option is out of range, or the request asks for several choices.
    """
    request = generate_request(asked)
    if request.n not in (None, 1):
        raise InvalidRequest.of("n", f"is {request.n}, but complete returns one text; use generate")
    if not sampling:
        return request
    _SAMPLING.convert("complete", sampling)  # raises a TypeError that names the fields
    return replace(request, sampling=replace(request.sampling, **sampling))
