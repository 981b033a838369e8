"""The public values of encoders: requests, and the events that answer them.

The rules of `engine.requests.text.values` hold: None means unset, and ranges that need no model are
checked when a request is made (`EmbedRequest.violations`, `RerankRequest.violations`). The other
ranges are checked by `engine.requests.encode.prepare`, before the first result.
"""

from __future__ import annotations

import struct
from dataclasses import InitVar, dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeAlias

from engine.core.common.events import Finished
from engine.core.encode.types import PRECISIONS, RANGED
from engine.errors import FieldViolation, InvalidRequest
from engine.requests.field_types import INPUTS, RANGES, CheckedFields
from engine.requests.text.values import Started, common_violations
from engine.status import Capability

if TYPE_CHECKING:
    from array import array
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from engine.core.encode.types import Numbers
    from engine.requests.encode.classify_values import Classification, ClassifyRequest

MAX_INPUTS = 2048  # inputs of a request, as in OpenAI's API
# The kinds of vectors, and the capabilities of the models that make them.
VECTOR_KINDS = {
    "dense": Capability.TEXT_EMBEDDING,
    "sparse": Capability.SPARSE_EMBEDDING,
    "multi-vector": Capability.MULTI_VECTOR_EMBEDDING,
}
QUERY = "query"  # the name of the prompt of queries
MAX_PROMPT_NAME_CHARS = 128  # characters of a prompt's name; a guess
FLOAT32_MAX = 3.4028234663852886e38
# Fields that the other kinds of vectors do not have.
OF_DENSE = ("dimensions", "normalize", "precision", "ranges")
OF_SPARSE = ("top_k", "threshold")


@dataclass(frozen=True, slots=True)
class EmbedRequest(CheckedFields):
    """One Embed call. An input is a text, a tuple of token ids that are used unchanged, or the
    bytes of an image file (JPEG, PNG, WebP or GIF), for models that embed images.

    ``dimensions`` cuts each vector to that many numbers. ``normalize`` says whether to scale
    vectors, after the cut, to length 1; unset: as the model does. ``truncate`` says whether inputs
    that are too long lose their end (unset: True) or are refused. ``precision`` is float32 (if it
    is empty), float16, int8, uint8, binary or ubinary, as sentence-transformers names them;
    ``ranges`` are the least and the greatest numbers of all dimensions, for int8 and uint8 (unset:
    the model's own). ``kind`` is one of `VECTOR_KINDS` (if it is empty, dense). Of a sparse vector
    only the ``top_k`` greatest weights are sent, and those above ``threshold``. ``timeout_s``,
    ``request_id``, ``check`` and the errors are those of `GenerateRequest`.
    """

    TYPES: ClassVar = {"inputs": INPUTS, "ranges": RANGES}
    operation: ClassVar = "embeddings"
    model: str = ""
    inputs: tuple[str | bytes | tuple[int, ...], ...] = ()
    dimensions: int | None = None
    normalize: bool | None = None
    prompt_name: str = ""
    truncate: bool | None = None
    precision: str = ""
    ranges: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    kind: str = ""
    top_k: int | None = None
    threshold: float | None = None
    request_id: str = ""
    priority: int | None = None
    timeout_s: float | None = None
    background: bool = False
    check: InitVar[bool] = True

    @property
    def num_inputs(self) -> int:
        """The number of inputs, each of which has one event."""
        return len(self.inputs)

    @property
    def has_images(self) -> bool:
        """Whether an input is an image."""
        return bytes in map(type, self.inputs)

    @property
    def capability(self) -> Capability:
        """The capability that a model must have for the request."""
        return Capability.IMAGE_EMBEDDING if self.has_images else VECTOR_KINDS[self.kind or "dense"]

    @property
    def image_bytes(self) -> int:
        """The bytes of the request's image files."""
        return sum(len(input_) for input_ in self.inputs if isinstance(input_, bytes))

    def violations(self) -> Iterator[FieldViolation]:
        """Yield every broken field, by proto path."""
        yield from count_violations("inputs", len(self.inputs))
        yield from common_violations(self.priority, self.request_id, self.timeout_s)
        for index, input_ in enumerate(self.inputs[:MAX_INPUTS]):
            if not isinstance(input_, str) and not input_:
                name = "image" if isinstance(input_, bytes) else "token_ids.ids"
                yield FieldViolation(f"inputs[{index}].{name}", "is empty")
        if self.dimensions is not None and self.dimensions < 1:
            yield FieldViolation("dimensions", "must be at least 1")
        if len(self.prompt_name) > MAX_PROMPT_NAME_CHARS:
            what = f"must have at most {MAX_PROMPT_NAME_CHARS} characters"
            yield FieldViolation("prompt_name", what)
        yield from self._kind_violations()
        if self.precision and self.precision not in PRECISIONS:
            yield FieldViolation("precision", f"is not one of {', '.join(PRECISIONS)}")
        elif self.ranges is not None:
            yield from self._range_violations(*self.ranges)

    def _kind_violations(self) -> Iterator[FieldViolation]:
        if self.kind and self.kind not in VECTOR_KINDS:
            yield FieldViolation("kind", f"is not one of {', '.join(VECTOR_KINDS)}")
        is_sparse = self.kind == "sparse"
        for name in OF_DENSE if is_sparse else OF_SPARSE:
            if getattr(self, name) not in (None, ""):
                what = f"is set, and vectors of kind {self.kind or 'dense'} have none"
                yield FieldViolation(name, what)
        for index, input_ in enumerate(self.inputs[:MAX_INPUTS]):
            if isinstance(input_, bytes) and self.kind not in ("", "dense"):
                yield FieldViolation(f"inputs[{index}].image", f"has no {self.kind} vector")
        if self.top_k is not None and self.top_k < 1:
            yield FieldViolation("top_k", "must be at least 1")
        if self.threshold is not None and not 0 <= self.threshold <= FLOAT32_MAX:
            yield FieldViolation(
                "threshold", f"is {self.threshold:g}, outside [0, {FLOAT32_MAX:g}]"
            )

    def _range_violations(
        self, low: tuple[float, ...], high: tuple[float, ...]
    ) -> Iterator[FieldViolation]:
        if self.precision not in RANGED:
            yield FieldViolation("ranges", f"are set, and only {' and '.join(RANGED)} have them")
        if len(low) != len(high):
            yield FieldViolation("ranges", f"have {len(low)} low and {len(high)} high numbers")
            return
        for index, (least, most) in enumerate(zip(low, high, strict=True)):
            for name, number in (("low", least), ("high", most)):
                if not abs(number) <= FLOAT32_MAX:
                    yield FieldViolation(f"ranges.{name}[{index}]", "is not a finite float32")
                    return
            if least > most:
                what = f"is {most:g}, below ranges.low[{index}], which is {least:g}"
                yield FieldViolation(f"ranges.high[{index}]", what)
                return
            if most - least > FLOAT32_MAX:
                what = f"is {most:g}, more than a float32 above ranges.low[{index}]"
                yield FieldViolation(f"ranges.high[{index}]", what)
                return


class IndexedInput(NamedTuple):
    """An input of an EmbedStream, with the client's own number. None: the client set none."""

    index: int  # type: ignore[assignment]  # the proto's name; it hides tuple.index
    input: str | bytes | tuple[int, ...] | None

    @property
    def num_bytes(self) -> int:
        """About how many bytes it takes."""
        if self.input is None:
            return 0
        return len(self.input) * (8 if isinstance(self.input, tuple) else 1)


@dataclass(frozen=True, slots=True)
class EmbedStreamRequest:
    """One EmbedStream call. ``parameters`` have no inputs. ``source`` returns the next inputs, and
    None behind the last ones; an error that it raises ends the stream. None: it is read no more.
    """

    parameters: EmbedRequest
    source: Callable[[], Awaitable[Sequence[IndexedInput] | None]] | None
    image_bytes = 0  # those of its inputs are counted where they run

    @property
    def request_id(self) -> str:
        """The client's own id."""
        return self.parameters.request_id

    @property
    def model(self) -> str:
        """The model's name."""
        return self.parameters.model

    @property
    def priority(self) -> int | None:
        """The rank of each of its inputs."""
        return self.parameters.priority

    @property
    def timeout_s(self) -> float | None:
        """The seconds until the client's deadline for the whole stream."""
        return self.parameters.timeout_s

    @property
    def capability(self) -> Capability:
        """The capability that a model must have for texts."""
        return self.parameters.capability

    def validate(self) -> None:
        """Check the parameters, as far as that needs no model.

        Raises:
            InvalidRequest: The error has one violation for each wrong field.
        """
        if self.parameters.inputs:
            raise InvalidRequest.of("parameters.inputs", "are set: inputs come beside parameters")
        try:
            replace(self.parameters, inputs=("",), check=False).validate()
        except InvalidRequest as error:
            raise error.renamed(lambda field: f"parameters.{field}") from None


@dataclass(frozen=True, slots=True)
class RerankRequest(CheckedFields):
    """One Rerank call. ``raw_scores`` leaves out the model's activation function. With ``top_n``,
    only that many of the best scores are sent, sorted, at the end. The other fields are as in
    `EmbedRequest`."""

    operation: ClassVar = "rerank"
    capability = Capability.RERANK
    image_bytes = 0
    model: str = ""
    query: str = ""
    documents: tuple[str, ...] = ()
    raw_scores: bool | None = None
    truncate: bool | None = None
    top_n: int | None = None
    request_id: str = ""
    priority: int | None = None
    timeout_s: float | None = None
    background: bool = False
    check: InitVar[bool] = True

    @property
    def num_inputs(self) -> int:
        """The number of documents, each of which has one score."""
        return len(self.documents)

    def violations(self) -> Iterator[FieldViolation]:
        """Yield every broken field, by proto path."""
        yield from count_violations("documents", len(self.documents))
        yield from common_violations(self.priority, self.request_id, self.timeout_s)
        if not self.query:
            yield FieldViolation("query", "is empty")
        if self.top_n is not None and self.top_n < 1:
            yield FieldViolation("top_n", "must be at least 1")


def count_violations(field: str, count: int) -> Iterator[FieldViolation]:
    """Yield a violation unless a request has 1 to `MAX_INPUTS` inputs."""
    if not 1 <= count <= MAX_INPUTS:
        yield FieldViolation(field, f"has {count}, outside [1, {MAX_INPUTS}]")


class Embedding(NamedTuple):
    """The vector of the input ``index``, made from ``tokens`` tokens. Its ``values`` are those of
    the ``precision``; those of float16 are their bits, which `numbers` reads. Of a sparse vector
    they are the weights at the places ``indices``, which ascend. Of several vectors, one for each
    token, they are those of all ``rows``, one after the other."""

    index: int  # type: ignore[assignment]  # the proto's name; it hides tuple.index
    values: Numbers
    tokens: int
    precision: str = "float32"
    indices: array[int] | None = None
    rows: int | None = None

    @property
    def numbers(self) -> Sequence[float]:
        """The values as numbers, whatever the precision."""
        if self.precision != "float16":
            return self.values
        return struct.unpack(f"{len(self.values)}e", self.values)


class InputFault(NamedTuple):
    """Why the input ``index`` of an EmbedStream has no vector: the ``reason`` of an error, and its
    message."""

    index: int  # type: ignore[assignment]  # the proto's name; it hides tuple.index
    reason: str
    message: str


class Score(NamedTuple):
    """How well the document ``index`` answers the query; higher is better."""

    index: int  # type: ignore[assignment]  # the proto's name; it hides tuple.index
    score: float


EncodeRequests: TypeAlias = "EmbedRequest | RerankRequest | ClassifyRequest"
EmbedStreamEvent: TypeAlias = Started | Embedding | InputFault
EmbedEvent: TypeAlias = Started | Embedding | Finished
RerankEvent: TypeAlias = Started | Score | Finished
EncodeEvent: TypeAlias = "Started | Embedding | Score | Classification | Finished"
