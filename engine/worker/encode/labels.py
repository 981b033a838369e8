"""Turns logits into scores of labels: of whole inputs, or of entities in a text.

The numbers are those of transformers' pipelines. Rule: this file imports no torch.

Source: transformers, pipelines/text_classification.py and token_classification.py; only the
behaviour is the same.
"""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from engine.core.encode.types import EncodeRowResult, name_of_group

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.core.encode.types import CharSpan, EncodeRow

    Array = np.ndarray[Any, Any]

OUTSIDE = "O"  # the label of tokens that belong to no entity
BEGIN = "B-"  # the label of the first token of an entity begins so, and of the others with "I-"


def activated(logits: Array, activation: str) -> Array:
    """Return the scores of logits ([…, labels] float32) by one of `ACTIVATIONS`."""
    if activation == "none":
        return logits
    if activation == "sigmoid":
        with np.errstate(over="ignore"):
            scores: Array = 1.0 / (1.0 + np.exp(-logits))
        return scores
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares: Array = powers / powers.sum(axis=-1, keepdims=True)
    return shares


def labelled(row: EncodeRow, logits: Array, activation: str) -> EncodeRowResult | None:
    """Return the scores of an input's labels ([labels]), the best first, of equal ones the first
    label. ``activation`` is the model's own. None if a logit is not finite."""
    if not np.isfinite(logits).all():
        return None
    scores = activated(logits, row.options.activation or activation)
    best = np.argsort(-scores, kind="stable")[: row.options.top_k]
    return EncodeRowResult(
        row.sequence, array("f", scores[best].tolist()), array("I", best.tolist())
    )


class Entity(NamedTuple):
    """Some characters of a text, and their label and its score."""

    label: int
    score: float
    start: int
    end: int


def entities_of(
    logits: Array, spans: Sequence[CharSpan | None], labels: Sequence[str], aggregation: str
) -> list[Entity]:
    """Return a text's entities in order by one of `AGGREGATIONS`. ``logits`` ([tokens, labels]) and
    ``spans`` are of all tokens; special tokens belong to no entity."""
    places = [place for place, span in enumerate(spans) if span is not None]
    known = [span for span in spans if span is not None]
    scores = activated(logits[places], "softmax") if places else logits[:0]
    if aggregation in ("none", "simple"):
        units = [
            _entity(own, span.start, span.end) for own, span in zip(scores, known, strict=True)
        ]
    else:
        units = list(_words(scores, known, aggregation))
    if aggregation == "none":
        return [unit for unit in units if labels[unit.label] != OUTSIDE]
    return [one for one in _groups(units, labels) if name_of_group(labels[one.label]) != OUTSIDE]


def _entity(scores: Array, start: int, end: int) -> Entity:
    best = int(scores.argmax())
    return Entity(best, float(scores[best]), start, end)


def _words(scores: Array, spans: Sequence[CharSpan], aggregation: str) -> Iterator[Entity]:
    """Yield each word with one label: that of its first token, of its surest token, or the best by
    the average of its tokens' scores."""
    starts = [place for place, span in enumerate(spans) if not place or not span.is_inside]
    for first, end in pairwise([*starts, len(spans)]):
        own = scores[first:end]
        if aggregation == "first":
            made = own[0]
        elif aggregation == "max":
            made = own[own.max(axis=-1).argmax()]
        else:
            made = own.mean(axis=0)
        yield _entity(made, spans[first].start, spans[end - 1].end)


def _groups(units: Sequence[Entity], labels: Sequence[str]) -> Iterator[Entity]:
    """Yield runs of neighbours whose labels have one name behind "B-" or "I-"; "B-" begins a run.
    The score is the mean."""
    runs: list[list[Entity]] = []
    for unit in units:
        label = labels[unit.label]
        if runs and not label.startswith(BEGIN) and _tag(label) == _tag(labels[runs[-1][-1].label]):
            runs[-1].append(unit)
        else:
            runs.append([unit])
    for run in runs:
        score = float(np.mean([unit.score for unit in run]))
        yield Entity(run[0].label, score, run[0].start, run[-1].end)


def _tag(label: str) -> str:
    return label[2:] if label[:2] in (BEGIN, "I-") else label


def packed_entities(row: EncodeRow, entities: Sequence[Entity]) -> EncodeRowResult:
    """Return the result of a row with entities."""
    return EncodeRowResult(
        row.sequence,
        array("f", [one.score for one in entities]),
        array("I", [one.label for one in entities]),
        spans=array("I", [number for one in entities for number in (one.start, one.end)]),
    )
