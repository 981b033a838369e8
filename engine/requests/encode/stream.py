"""The stream of a request to an encoder: Started, a result for each input, and Finished.

Rule: results are passed on as they come, each in a message slot. The scores of a rerank with
``top_n`` are kept here, free their slots at once, and are passed on sorted, at the end.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine.core.common.credit import Credit
from engine.core.common.phases import Phase
from engine.core.common.types import RequestId
from engine.core.encode.types import GROUPED, Encoded, bytes_of_row, name_of_group
from engine.requests.encode.classify_values import Classification, ClassifyRequest
from engine.requests.encode.values import (
    Embedding,
    EmbedRequest,
    EncodeEvent,
    EncodeRequests,
    Score,
)
from engine.requests.stream import RequestStream
from engine.requests.text.values import Started

if TYPE_CHECKING:
    from engine.core.common.events import Admitted, Finished, OutputEvent
    from engine.core.encode.types import EncodeRequest
    from engine.requests.prepared import Prepared
    from engine.requests.stream import StreamOptions


def credited_by(request: EncodeRequests) -> tuple[type, ...]:
    """Return the classes of a request's events that hold a message slot."""
    if isinstance(request, EmbedRequest):
        return (Embedding,)
    if isinstance(request, ClassifyRequest):
        return (Classification,)
    return (Score,) if request.top_n is None else ()


# Bytes of vectors of tokens, of labels or of entities that wait for one reader, or of one input if
# that has more; a guess.
WAITING_BYTES_MAX = 16 * 2**20
LABEL_BYTES, ENTITY_BYTES = 8, 16  # of a label and its score; an entity has a span, too


class EncodeStream(RequestStream[EncodeEvent]):
    """An Embed, a Rerank or a Classify request's life on the Trio thread."""

    how_far = "after {0._num_done} of {0.num_inputs} inputs"
    result_types = (Embedding, Score, Classification)

    def __init__(self, request: EncodeRequests, options: StreamOptions[EncodeEvent]) -> None:
        self.operation, self.num_inputs = request.operation, request.num_inputs
        self._top_n: int | None = getattr(request, "top_n", None)
        self._names: tuple[str, ...] = ()  # of a classifier's labels
        self._num_done = 0
        self._scores: list[Score] = []
        num_kept = min(self.num_inputs, self._top_n or 0)
        # Started, Finished, and the scores that are kept until the end, hold no message slot.
        num_beside = 2 + max(0, num_kept)
        super().__init__(request, options, num_beside=num_beside, credited=credited_by(request))
        self._has_matrices = isinstance(request, EmbedRequest) and request.kind == "multi-vector"
        if self._has_matrices:
            self.num_per_release = 1

    def _take(self, prepared: Prepared[EncodeRequest]) -> None:
        """Let as many results of variable size wait for the reader as `WAITING_BYTES_MAX` has room
        for."""
        if self.replica is None:
            return
        options, info = prepared.request.options, self.replica.info
        longest = max(input_.num_tokens for input_ in prepared.request.inputs)
        if self._has_matrices:
            number = options.dimensions or info.dimensions
            largest = longest * bytes_of_row(number, options.precision)
        elif options.aggregation:
            largest = ENTITY_BYTES * longest
            self._names = info.labels
            if options.aggregation in GROUPED:
                self._names = tuple(map(name_of_group, info.labels))
        elif options.activation is not None:
            largest, self._names = LABEL_BYTES * len(info.labels), info.labels
        else:
            return
        most = max(1, WAITING_BYTES_MAX // largest)
        self.credit = Credit(min(self.credit.capacity, most))

    # ---- the loop's side

    def push(self, event: OutputEvent) -> None:
        """Take an event of the core; pass results on, or keep scores for the end."""
        if event.__class__ is not Encoded:
            super().push(event)
            return
        self._num_done += 1
        self._note_result(Phase.ENCODE, self.tokens_done + event.tokens)
        _, values, indices, rows, spans = event.result
        if isinstance(self.request, EmbedRequest):
            precision = self.request.precision or "float32"
            vector = Embedding(event.index, values, event.tokens, precision, indices, rows)
            self._hand_over(vector)
            return
        if isinstance(self.request, ClassifyRequest):
            assert indices is not None, "a classifier's result has labels"
            self._hand_over(
                Classification(event.index, values, indices, self._names, event.tokens, spans)
            )
            return
        score = Score(event.index, values[0])
        if self._top_n is None:
            self._hand_over(score)
        elif not self.is_closed:
            self._scores.append(score)
            self.release(1)

    def _hand_over(self, result: Embedding | Score | Classification) -> None:
        self.num_made += 1
        self._reader.push(result)

    def _admit(self, event: Admitted) -> None:
        if not self._is_begun:
            self._is_begun = True
            self._reader.push(Started(self.request_id, self.model, event.prompt_tokens))

    def _finish(self, event: Finished) -> None:
        best = sorted(self._scores, key=lambda score: (-score.score, score.index))
        for score in best[: self._top_n]:
            self._hand_over(score)
        self._scores.clear()
        self._reader.push(replace(event, request_id=RequestId(self.request_id)))
        self.close(None)
