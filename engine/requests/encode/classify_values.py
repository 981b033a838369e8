"""The public values of Classify: its request, and the event of each input.

The rules of `engine.requests.encode.values` hold.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeAlias, TypeGuard

from engine.core.common.events import Finished
from engine.core.encode.types import ACTIVATIONS, AGGREGATIONS
from engine.errors import FieldViolation
from engine.requests.encode.values import MAX_INPUTS, count_violations
from engine.requests.field_types import LABELLED, CheckedFields
from engine.requests.text.values import Started, common_violations
from engine.status import Capability

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator

    from engine.core.encode.types import Numbers

Labelled: TypeAlias = str | tuple[int, ...] | tuple[str, str]


@dataclass(frozen=True, slots=True)
class ClassifyRequest(CheckedFields):
    """One Classify call. An input is a text, a pair of texts, or a tuple of token ids that are used
    unchanged.

    ``activation`` is none, sigmoid or softmax (if it is empty, as the model's config says), and
    ``top_k`` the number of best labels that are sent (unset: all). With an ``aggregation``, which
    is none, simple, first, average or max as in transformers' pipelines, entities of each text are
    sent instead, by a model that labels tokens. The other fields are as in `EmbedRequest`.
    """

    TYPES: ClassVar = {"inputs": LABELLED}
    operation: ClassVar = "classify"
    image_bytes: ClassVar = 0
    model: str = ""
    inputs: tuple[Labelled, ...] = ()
    activation: str = ""
    top_k: int | None = None
    aggregation: str = ""
    truncate: bool | None = None
    request_id: str = ""
    priority: int | None = None
    timeout_s: float | None = None
    background: bool = False
    check: InitVar[bool] = True

    @property
    def capability(self) -> Capability:
        """The capability that a model must have for the request."""
        tokens, texts = Capability.TOKEN_CLASSIFICATION, Capability.TEXT_CLASSIFICATION
        return tokens if self.aggregation else texts

    @property
    def num_inputs(self) -> int:
        """The number of inputs, each of which has one event."""
        return len(self.inputs)

    def violations(self) -> Iterator[FieldViolation]:
        """Yield every broken field, by proto path."""
        yield from count_violations("inputs", len(self.inputs))
        yield from common_violations(self.priority, self.request_id, self.timeout_s)
        if self.activation and self.activation not in ACTIVATIONS:
            yield FieldViolation("activation", f"is not one of {', '.join(ACTIVATIONS)}")
        if self.aggregation and self.aggregation not in AGGREGATIONS:
            yield FieldViolation("aggregation", f"is not one of {', '.join(AGGREGATIONS)}")
        if self.top_k is not None and self.top_k < 1:
            yield FieldViolation("top_k", "must be at least 1")
        for name in ("activation", "top_k") if self.aggregation else ():
            if getattr(self, name) not in (None, ""):
                yield FieldViolation(name, "is set, and entities have none (aggregation)")
        for index, input_ in enumerate(self.inputs[:MAX_INPUTS]):
            if not isinstance(input_, str):
                yield from self._input_violations(f"inputs[{index}]", input_)

    def _input_violations(
        self, path: str, given: tuple[int, ...] | tuple[str, str]
    ) -> Iterator[FieldViolation]:
        if not given:
            yield FieldViolation(f"{path}.token_ids.ids", "is empty")
        elif self.aggregation:
            name = "pair" if is_pair(given) else "token_ids"
            yield FieldViolation(f"{path}.{name}", "is set, and entities are of one text alone")


def is_pair(given: Labelled | bytes) -> TypeGuard[tuple[str, str]]:
    """Return whether an input is a pair of texts."""
    return isinstance(given, tuple) and bool(given) and isinstance(given[0], str)


def is_ids(given: Labelled | bytes) -> TypeGuard[tuple[int, ...]]:
    """Return whether an input is token ids."""
    return isinstance(given, tuple) and not is_pair(given)


class LabelScore(NamedTuple):
    """A label and its score; a higher one is surer."""

    label: str
    score: float


class Entity(NamedTuple):
    """A label of the characters (Unicode's code points) of a text from ``start`` up to ``end``,
    and its score from 0 to 1."""

    label: str
    score: float
    start: int
    end: int


class Classification(NamedTuple):
    """The result of the input ``index``, which has ``tokens`` tokens: its ``labels``, the best
    first, or its ``entities``, in the order of the text. ``scores`` are of the labels ``ids``,
    whose names are in ``names``; ``spans`` are the first characters and the ends of entities."""

    index: int  # type: ignore[assignment]  # the proto's name; it hides tuple.index
    scores: Numbers
    ids: array[int]
    names: tuple[str, ...]
    tokens: int
    spans: array[int] | None = None

    @property
    def labels(self) -> tuple[LabelScore, ...]:
        """The labels of the input; none of an input with entities."""
        if self.spans is not None:
            return ()
        rows = zip(self.ids, self.scores, strict=True)
        return tuple(LabelScore(self.names[label], score) for label, score in rows)

    @property
    def entities(self) -> tuple[Entity, ...]:
        """The entities of the input."""
        if self.spans is None:
            return ()
        rows = zip(self.ids, self.scores, self.spans[::2], self.spans[1::2], strict=True)
        return tuple(
            Entity(self.names[label], score, start, end) for label, score, start, end in rows
        )


ClassifyEvent: TypeAlias = Started | Classification | Finished
