"""A fake encoder: its values are digests of the tokens, its costs and faults come from a script.

It is part of the product, like `engine.worker.fakes.text`, whose script and tokenizer it uses. Rule
1: this file imports no torch. Rule 2: an input's values depend on its own tokens and options alone
and are exact in float32, so that a test sees when a request gets another request's values.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.core.common.steps import RowFailure, RowPhase, StepTimings
from engine.core.encode.types import (
    PRECISIONS,
    AnyInput,
    EncodeInput,
    EncodePlan,
    EncodeResult,
    EncodeRow,
    EncodeRowResult,
    ImageInput,
    TokenizedInput,
)
from engine.errors import FieldViolation, InvalidRequest
from engine.images.fit import FittedImage, ImageFit
from engine.status import Capability
from engine.worker.encode.interface import EncoderInfo
from engine.worker.fakes.digests import VOCAB_SIZE, digest_after
from engine.worker.fakes.precision import in_precision
from engine.worker.fakes.scripted import ScriptedRunner
from engine.worker.fakes.text import FakeScript
from engine.worker.fakes.tokenizer import FakeTokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.core.encode.types import EncodeOptions, Numbers

DIMENSIONS = 8
IMAGE_TOKENS = 16
SEPARATOR = 900  # the id between a query and its document
PROMPTS = {"query": "<7><8>"}
LABELS = ("red", "green", "blue")
TOKEN_LABELS = ("O", "B-x", "I-x", "y")
# What each activation divides the numbers of a fake classifier by; "" is the model's own.
DIVISORS = {"": 2, "none": 1, "sigmoid": 2, "softmax": 4}
APART = (Capability.SPARSE_EMBEDDING, Capability.MULTI_VECTOR_EMBEDDING)
RANGES = array("f", [0.0] * DIMENSIONS + [1.0] * DIMENSIONS).tobytes()  # of its whole vectors


def digest_of(token_ids: Sequence[int]) -> int:
    """Return a digest of the tokens, 32 bits."""
    digest = 0
    for token_id in token_ids:
        digest = digest_after(digest, token_id)
    return digest


def vector_of(token_ids: Sequence[int], dimensions: int = DIMENSIONS) -> list[float]:
    """Return the vector of an input's tokens, not normalised; its numbers are multiples of
    2**-16."""
    digests = [digest_after(digest_of(token_ids), place) for place in range(DIMENSIONS)]
    return [(digest & 0xFFFF) / 2**16 for digest in digests][:dimensions]


@dataclass(frozen=True, slots=True)
class FakeFit(ImageFit):
    """Fits images to 4 × 4 pixels. Decoding an image takes the time of ``sleep(decode_s)``."""

    num_tokens: int = IMAGE_TOKENS
    max_pixels: int = 2**20
    size: tuple[int, int] | None = (4, 4)
    decode_s: float = 0.0
    sleep: Callable[[float], None] = time.sleep

    def read(self, data: bytes) -> FittedImage:
        """Decode an image file and fit it (`ImageFit.read`)."""
        if self.decode_s:
            self.sleep(self.decode_s)
        return ImageFit.read(self, data)


def weights_of(
    token_ids: Sequence[int], top_k: int | None = None, threshold: float = 0.0
) -> dict[int, float]:
    """Return the weights of an input's sparse vector by index: those of its vector that are above a
    half, so that there may be none."""
    weights = {10 * at: one for at, one in enumerate(vector_of(token_ids)) if one > 0.5}
    best = sorted(weights, key=lambda at: (-weights[at], at))[:top_k]
    return {at: weights[at] for at in sorted(best) if weights[at] > threshold}


def rows_of(token_ids: Sequence[int], dimensions: int = DIMENSIONS) -> list[list[float]]:
    """Return the vectors of an input's tokens, each of a token and its place; a token that can be
    divided by 5 has none."""
    return [
        vector_of((at, token_id), dimensions)
        for at, token_id in enumerate(token_ids)
        if token_id % 5
    ]


def score_of(token_ids: Sequence[int], *, raw: bool = False) -> float:
    """Return the score of a pair, from 0 to 1 if ``raw`` and from 0 to 0.5 otherwise."""
    score = (digest_of(token_ids) & 0xFFFF) / 2**16
    return score if raw else score / 2


def label_scores_of(
    token_ids: Sequence[int], activation: str, top_k: int | None = None, *, is_ranker: bool = False
) -> list[tuple[int, float]]:
    """Return an input's labels, the best first, with their scores. A reranker's one label has the
    raw score."""
    scores = [score_of(token_ids, raw=True)] if is_ranker else vector_of(token_ids, len(LABELS))
    best = sorted(range(len(scores)), key=lambda label: -scores[label])
    return [(label, scores[label] / DIVISORS[activation]) for label in best[:top_k]]


def entities_of(token_ids: Sequence[int], aggregation: str) -> list[tuple[int, float, int, int]]:
    """Return the label, the score, the first place and the end of each entity. A token's label and
    score depend on it alone, and its characters are its place. Neighbours with one label are one
    entity, unless the aggregation is none."""
    found: list[tuple[int, float, int, int]] = []
    for at, token_id in enumerate(token_ids):
        label = token_id % len(TOKEN_LABELS)
        if aggregation != "none" and found and found[-1][0] == label and found[-1][3] == at:
            found[-1] = (*found[-1][:3], at + 1)
        elif label:
            found.append((label, score_of([token_id]), at, at + 1))
    return found


def ids_of(input_: AnyInput) -> tuple[int, ...]:
    """Return the tokens that an input's vector depends on. An image's tokens are its bytes."""
    return tuple(input_.image.pixels) if isinstance(input_, ImageInput) else input_.token_ids


class FakeInputTokenizer:
    """Implements `engine.worker.encode.interface.EncoderTokenizer` with a `FakeTokenizer`."""

    def __init__(self, script: FakeScript, max_tokens: int, *, is_apart: bool = False) -> None:
        self._tokenizer = FakeTokenizer(script)
        self._max_tokens = max_tokens
        self._is_apart = is_apart

    def encode_texts(self, texts: Sequence[str], prompt_name: str) -> list[TokenizedInput]:
        """Return one input for each text, with the named prompt of `PROMPTS` before it.

        Raises:
            InvalidRequest: A text is not Unicode; the violation's field is its index.
        """
        prompt = self._tokenizer.encode(PROMPTS.get(prompt_name, ""))
        return [
            self._cut(prompt + self._ids(text, str(index)), len(prompt))
            for index, text in enumerate(texts)
        ]

    def encode_pairs(self, query: str, documents: Sequence[str]) -> list[TokenizedInput]:
        """Return one input for each document: the query, the `SEPARATOR`, the document. A model
        that reads texts apart has the query beside the document.

        Raises:
            InvalidRequest: A text is not Unicode; the violation's field is its index, or ``query``.
        """
        head = (*self._ids(query, "query"), SEPARATOR)
        if self._is_apart:
            own, full = EncodeInput(head[:-1][: self._max_tokens]), len(head) - 1
            made = [self._cut(self._ids(text, str(i))) for i, text in enumerate(documents)]
            return [
                TokenizedInput(one.input._replace(query=own), one.full_tokens, full) for one in made
            ]
        return [self._cut(head + self._ids(text, str(i))) for i, text in enumerate(documents)]

    def _ids(self, text: str, field: str) -> tuple[int, ...]:
        try:
            return self._tokenizer.encode(text)
        except InvalidRequest as error:
            [violation] = error.violations
            raise InvalidRequest([FieldViolation(field, violation.description)]) from error

    def _cut(self, ids: tuple[int, ...], prompt_tokens: int = 0) -> TokenizedInput:
        return TokenizedInput(EncodeInput(ids[: self._max_tokens], (), prompt_tokens), len(ids))


class FakeEncoder(ScriptedRunner["EncodePlan", "EncodeResult"]):
    """Implements `engine.worker.encode.interface.EncodeRunner` without a model.

    `execute` also raises an AssertionError for rows that are not sorted by length, or not of one
    kind.
    """

    def __init__(
        self,
        kind: Capability = Capability.TEXT_EMBEDDING,
        *,
        max_model_len: int = 2048,
        script: FakeScript | None = None,
        memory_bytes: int = VOCAB_SIZE,
    ) -> None:
        script = script or FakeScript()
        is_embedding = kind.value.endswith("embedding")
        labels = {
            Capability.RERANK: ("LABEL_0",),
            Capability.TEXT_CLASSIFICATION: LABELS,
            Capability.TOKEN_CLASSIFICATION: TOKEN_LABELS,
        }
        info = EncoderInfo(
            kind=kind,
            architecture="fake",
            dtype="none",
            device="cpu",
            vocab_size=VOCAB_SIZE,
            max_model_len=max_model_len,
            memory_bytes=memory_bytes,
            dimensions=DIMENSIONS if is_embedding else 0,
            prompt_names=tuple(PROMPTS) if is_embedding else (),
            ranges=RANGES if is_embedding else b"",
            images=FakeFit(decode_s=script.decode_s, sleep=script.sleep)
            if kind is Capability.IMAGE_EMBEDDING
            else None,
            labels=labels.get(kind, ()),
        )
        super().__init__(script, info)

    @property
    def encoder_tokenizer(self) -> FakeInputTokenizer:
        """A tokenizer for inputs, which cuts them to ``max_model_len`` tokens."""
        is_apart = self.info.kind in APART
        return FakeInputTokenizer(self.script, self.info.max_model_len, is_apart=is_apart)

    def close(self) -> None:
        """Do nothing, because the fake holds nothing."""

    def _execute(self, plan: EncodePlan) -> EncodeResult:
        cost = self._spend(plan.num_tokens)
        self._fail(plan, self.script.encode_fault)
        kinds = {row.input.kind for row in plan.rows}
        if len(kinds) > 1:
            raise AssertionError(f"the rows are of several kinds: {kinds}")
        lengths = [row.input.num_tokens for row in plan.rows]
        if lengths != sorted(lengths):
            raise AssertionError(f"the rows are not sorted by length: {lengths}")
        rows = tuple(self._encode(row) for row in plan.rows)
        return EncodeResult(plan.plan_id, rows, StepTimings(forward_s=cost))

    def _encode(self, row: EncodeRow) -> EncodeRowResult | RowFailure:
        fault = self.script.row_faults.get(row.sequence)
        if fault is not None:
            return RowFailure(row.sequence, RowPhase(fault[1]), "scripted")
        return self._row_fault(row.sequence) or self._result(row)

    def _result(self, row: EncodeRow) -> EncodeRowResult:
        own, options, query = row.input, row.options, getattr(row.input, "query", None)
        ids = ids_of(own)
        if options.aggregation:
            found = entities_of(ids, options.aggregation)
            return EncodeRowResult(
                row.sequence,
                array("f", [score for _, score, _, _ in found]),
                array("I", [label for label, *_ in found]),
                spans=array("I", [place for *_, start, end in found for place in (start, end)]),
            )
        if options.activation is not None:
            is_ranker = self.info.kind is Capability.RERANK
            scores = label_scores_of(ids, options.activation, options.top_k, is_ranker=is_ranker)
            values = array("f", [score for _, score in scores])
            return EncodeRowResult(row.sequence, values, array("I", [at for at, _ in scores]))
        if query is not None:
            pair = (*query.token_ids, SEPARATOR, *ids)
            return EncodeRowResult(row.sequence, self._values(pair, options, is_score=True))
        if self.info.kind is Capability.SPARSE_EMBEDDING:
            kept = weights_of(ids, options.top_k, options.threshold)
            values, indices = array("f", kept.values()), array("I", kept)
            return EncodeRowResult(row.sequence, values, indices)
        if self.info.kind is Capability.MULTI_VECTOR_EMBEDDING:
            rows = [_finished(one, options) for one in rows_of(ids)]
            values = array(PRECISIONS[options.precision])
            for one in rows:
                values.extend(one)
            return EncodeRowResult(row.sequence, values, rows=len(rows))
        return EncodeRowResult(row.sequence, self._values(ids, options))

    def _values(
        self, token_ids: Sequence[int], options: EncodeOptions, *, is_score: bool = False
    ) -> Numbers:
        if is_score or self.info.kind is Capability.RERANK:
            return array("f", [score_of(token_ids, raw=options.raw_scores)])
        return _finished(vector_of(token_ids), options)


def _finished(values: list[float], options: EncodeOptions) -> Numbers:
    """Return a vector cut, scaled and in the precision asked for."""
    values = values[: options.dimensions]
    if options.normalize:
        length = sum(value * value for value in values) ** 0.5
        values = [value / length for value in values]
    ranges = array("f", options.ranges)
    half = len(ranges) // 2
    return in_precision(values, options.precision, ranges[:half], ranges[half:])
