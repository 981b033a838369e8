"""The values of encoders: their requests, the plan that goes to a worker, and the result.

Rule 1: every class here is a value that pickles without torch (D8). Rule 2: an input is one
sequence of tokens, or one image, and is encoded once; a request has several, and each has one
result. Rule 3: a step has inputs of one kind.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from engine.core.common.steps import RowFailure, StepTimings

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable

    from engine.core.common.types import PlanId, RequestId, SequenceId
    from engine.images.fit import FittedImage

# The precisions of a vector, and the type codes of the arrays that hold its numbers. An array of
# float16 does not exist: one of unsigned integers has the bits.
PRECISIONS = {
    "float32": "f",
    "float16": "H",
    "int8": "b",
    "uint8": "B",
    "binary": "b",
    "ubinary": "B",
}
# The precisions that divide the range of each dimension into 256 equal parts.
RANGED = ("int8", "uint8")
# The functions that make scores of a classifier's logits, and the ways in which tokens become
# entities, by transformers' names.
ACTIVATIONS = ("none", "sigmoid", "softmax")
AGGREGATIONS = ("none", "simple", "first", "average", "max")
GROUPED = AGGREGATIONS[1:]
Numbers: TypeAlias = "array[float] | array[int]"


def name_of_group(label: str) -> str:
    """Return the name of an entity of several tokens, whose first one has the label."""
    return label.split("-", 1)[-1]


def bytes_of_row(dimensions: int, precision: str) -> int:
    """Return the bytes of a vector in one of the `PRECISIONS`; "" is float32."""
    if precision.endswith("binary"):
        return -(-dimensions // 8)
    return dimensions * {"float16": 2, "int8": 1, "uint8": 1}.get(precision, 4)


class InputKind(Enum):
    """The kinds of inputs."""

    TEXT = "text"
    IMAGE = "image"


class CharSpan(NamedTuple):
    """The characters of a token in its text, and whether it goes on with the word of the token
    before it."""

    start: int
    end: int
    is_inside: bool


class EncodeInput(NamedTuple):
    """One text as the model reads it, special tokens included.

    ``type_ids`` has one number for each token; empty stands for all 0. The first ``prompt_tokens``
    tokens are the model's own prompt, which some models leave out of their pooling. A model that
    takes no shorter text pads it to ``width`` tokens, even alone in a step; 0: no padding.

    The result is the text's vector or, if it has a ``query``, a score of how well it answers that.
    A model may treat a text that ``is_query`` in another way, of which the last ``expanded`` tokens
    were added as places for words that it lacks. A model that labels tokens has the ``spans`` of
    all tokens; None stands for a special token.
    """

    token_ids: tuple[int, ...]
    type_ids: tuple[int, ...] = ()
    prompt_tokens: int = 0
    width: int = 0
    query: EncodeInput | None = None
    is_query: bool = False
    expanded: int = 0
    spans: tuple[CharSpan | None, ...] = ()

    @property
    def kind(self) -> InputKind:
        """A text."""
        return InputKind.TEXT

    @property
    def num_tokens(self) -> int:
        """The tokens that are computed."""
        return max(len(self.token_ids), self.width)


class ImageInput(NamedTuple):
    """One image as the model reads it. ``num_tokens`` are the tokens that the model makes of it."""

    image: FittedImage
    num_tokens: int

    @property
    def kind(self) -> InputKind:
        """An image."""
        return InputKind.IMAGE


AnyInput: TypeAlias = EncodeInput | ImageInput


def queries_of(inputs: Iterable[AnyInput]) -> dict[EncodeInput, None]:
    """Return the different queries beside inputs, in order."""
    found = (input_.query for input_ in inputs if isinstance(input_, EncodeInput))
    return dict.fromkeys(query for query in found if query is not None)


class TokenizedInput(NamedTuple):
    """An input, cut to what the model takes; ``full_tokens`` is its length before the cut, and
    ``full_query`` that of its query."""

    input: EncodeInput
    full_tokens: int
    full_query: int = 0


@dataclass(frozen=True, slots=True)
class EncodeOptions:
    """What becomes of a model's output. If ``dimensions`` or ``normalize`` is None, the model's own
    configuration decides. ``raw_scores`` leaves out a cross-encoder's activation function.

    A sparse vector has its ``top_k`` greatest weights (None: as many as the model says), of which
    each is greater than ``threshold``.

    With an ``activation``, one of `ACTIVATIONS` or "" for the model's own, an input gets scores of
    its ``top_k`` best labels (None: all). With an ``aggregation``, one of `AGGREGATIONS`, its
    entities.

    ``precision`` is one of `PRECISIONS`. For one of `RANGED`, ``ranges`` are the least numbers of
    all dimensions and then the greatest, in float32; they are bytes, whose hash is kept.
    """

    dimensions: int | None = None
    normalize: bool | None = None
    raw_scores: bool = False
    precision: str = "float32"
    ranges: bytes = b""
    top_k: int | None = None
    threshold: float = 0.0
    activation: str | None = None
    aggregation: str = ""


@dataclass(frozen=True, slots=True)
class EncodeRequest:
    """A request as the core schedules it: at least one input, each of at least one token.

    ``arrival`` and ``deadline`` are seconds of the engine's one clock. The request with the lowest
    ``priority`` goes first, among those of its holder.
    """

    request_id: RequestId
    inputs: tuple[AnyInput, ...]
    arrival: float
    options: EncodeOptions = field(default_factory=EncodeOptions)
    priority: int = 0
    deadline: float | None = None
    holder: str = ""  # as in `engine.core.text.types.Request`
    weight: int = 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all inputs together, and of each query beside them once."""
        return sum(input_.num_tokens for input_ in (*self.inputs, *queries_of(self.inputs)))

    @property
    def prompt_tokens(self) -> int:
        """The same tokens."""
        return self.num_tokens

    @property
    def num_tokens_ahead(self) -> int:
        """The same tokens: an encoder's output has none."""
        return self.num_tokens

    @property
    def num_choices(self) -> int:
        """One: all inputs end together."""
        return 1

    def journal_line(self) -> str:
        """Return the request in one stable line, without its inputs."""
        return (
            f"{self.request_id} inputs={len(self.inputs)} "
            f"tokens={self.num_tokens} priority={self.priority}"
        )


class EncodeRow(NamedTuple):
    """One input in a step, which computes all of it."""

    sequence: SequenceId
    input: AnyInput
    options: EncodeOptions


@dataclass(frozen=True, slots=True)
class EncodePlan:
    """One step of an encoder over ``rows``, inputs of one kind, the shortest first."""

    plan_id: PlanId
    rows: tuple[EncodeRow, ...]

    @property
    def kind(self) -> InputKind:
        """The kind of the step's inputs."""
        return self.rows[0].input.kind

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes: every row padded to the longest, and every query beside
        them once."""
        queries = queries_of(row.input for row in self.rows)
        padded = len(self.rows) * self.rows[-1].input.num_tokens
        return padded + sum(query.num_tokens for query in queries)

    def journal_line(self) -> str:
        """Return the plan in one stable line: the lengths of its rows."""
        lengths = ",".join(str(row.input.num_tokens) for row in self.rows)
        kind = "" if self.kind is InputKind.TEXT else f"{self.kind.value} "
        return f"plan {self.plan_id}: {kind}{lengths}"


class EncodeRowResult(NamedTuple):
    """The result of one input: a vector in the precision asked for, or one score. Of a sparse
    vector, ``values`` are the weights at the places ``indices``, which ascend; of a text with
    several vectors, they are those of its ``rows``, one after the other. A classifier's are the
    scores of the labels ``indices``: of the input, the best first, or of its entities, whose first
    characters and ends are in ``spans``."""

    sequence: SequenceId
    values: Numbers
    indices: array[int] | None = None
    rows: int | None = None
    spans: array[int] | None = None


@dataclass(frozen=True, slots=True)
class EncodeResult:
    """The result of a step: one entry for each row, in the plan's order."""

    plan_id: PlanId
    rows: tuple[EncodeRowResult | RowFailure, ...]
    timings: StepTimings = field(default_factory=StepTimings)


class Encoded(NamedTuple):
    """An output event: the result of input ``index``, which has ``tokens`` tokens."""

    request_id: RequestId
    index: int  # type: ignore[assignment]  # the proto's word, over tuple.index
    result: EncodeRowResult
    tokens: int

    def journal_line(self) -> str:
        """Return the event in one stable line."""
        return f"  encoded {self.request_id}/{self.index} {self.tokens}"
