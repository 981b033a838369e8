"""What a client asks of encoders and what it hears back: the public values beside Generate's.

Rule 1: as in `engine.requests`: None means unset, `validate` costs constant time per field and
lists every broken one by its proto path. What needs the model is checked in
`engine.encode_inputs`, before the first result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from engine.core.events import Finished
from engine.errors import FieldViolation, InvalidRequest
from engine.requests import INT32, MAX_REQUEST_ID_CHARS, GenerateRequest, Started

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator

MAX_INPUTS = 2048  # OpenAI's
MAX_PROMPT_NAME_CHARS = 128  # guess


@dataclass(frozen=True, slots=True)
class EmbedRequest:
    """One Embed call. An input is a text, or a tuple of token ids that are used as they are.

    ``dimensions`` cuts each vector to so many numbers; ``normalize`` scales it to length 1, or
    does not even if the model would; ``truncate`` (unset: True) cuts the end off what is too
    long, or has it refused. ``timeout_s`` and ``request_id`` as in `GenerateRequest`.
    """

    model: str = ""
    inputs: tuple[str | tuple[int, ...], ...] = ()
    dimensions: int | None = None
    normalize: bool | None = None
    prompt_name: str = ""
    truncate: bool | None = None
    request_id: str = ""
    priority: int | None = None
    timeout_s: float | None = None

    def validate(self) -> None:
        """Check every range that needs no model.

        Raises:
            InvalidRequest: with one violation per broken field.
        """
        found = [*_count_violations("inputs", len(self.inputs)), *_common_violations(self)]
        for index, one in enumerate(self.inputs[:MAX_INPUTS]):
            if not isinstance(one, str) and not one:
                found.append(FieldViolation(f"inputs[{index}].token_ids.ids", "is empty"))
        if self.dimensions is not None and self.dimensions < 1:
            found.append(FieldViolation("dimensions", "must be at least 1"))
        if len(self.prompt_name) > MAX_PROMPT_NAME_CHARS:
            what = f"must have at most {MAX_PROMPT_NAME_CHARS} characters"
            found.append(FieldViolation("prompt_name", what))
        if found:
            raise InvalidRequest(found)


@dataclass(frozen=True, slots=True)
class RerankRequest:
    """One Rerank call. ``raw_scores`` leaves out the model's activation; ``top_n`` sends only so
    many of the best, sorted, at the end. The rest as in `EmbedRequest`."""

    model: str = ""
    query: str = ""
    documents: tuple[str, ...] = ()
    raw_scores: bool | None = None
    truncate: bool | None = None
    top_n: int | None = None
    request_id: str = ""
    priority: int | None = None
    timeout_s: float | None = None

    def validate(self) -> None:
        """Check every range that needs no model.

        Raises:
            InvalidRequest: with one violation per broken field.
        """
        found = [*_count_violations("documents", len(self.documents)), *_common_violations(self)]
        if not self.query:
            found.append(FieldViolation("query", "is empty"))
        if self.top_n is not None and self.top_n < 1:
            found.append(FieldViolation("top_n", "must be at least 1"))
        if found:
            raise InvalidRequest(found)


def _count_violations(field: str, count: int) -> Iterator[FieldViolation]:
    if not 1 <= count <= MAX_INPUTS:
        yield FieldViolation(field, f"has {count}, outside [1, {MAX_INPUTS}]")


def _common_violations(request: EmbedRequest | RerankRequest) -> Iterator[FieldViolation]:
    if request.priority is not None and not INT32[0] <= request.priority <= INT32[1]:
        yield FieldViolation("priority", "is not an int32")
    if len(request.request_id) > MAX_REQUEST_ID_CHARS or not request.request_id.isprintable():
        yield FieldViolation(
            "request_id", f"must be at most {MAX_REQUEST_ID_CHARS} printable characters"
        )
    if request.timeout_s is not None and math.isnan(request.timeout_s):
        yield FieldViolation("timeout_s", "is not a number")


class Embedding(NamedTuple):
    """The vector of input ``index``, float32; ``tokens`` of it were computed."""

    index: int  # type: ignore[assignment]  # the proto's word, over tuple.index
    values: array[float]
    tokens: int


class Score(NamedTuple):
    """How well document ``index`` answers the query; higher is better."""

    index: int  # type: ignore[assignment]  # the proto's word, over tuple.index
    score: float


EncodeRequests: TypeAlias = EmbedRequest | RerankRequest
AnyRequest: TypeAlias = GenerateRequest | EmbedRequest | RerankRequest
EmbedEvent: TypeAlias = Started | Embedding | Finished
RerankEvent: TypeAlias = Started | Score | Finished
EncodeEvent: TypeAlias = Started | Embedding | Score | Finished
