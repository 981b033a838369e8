"""The stream of an Embed or a Rerank request: Started, a result for each input, and Finished.

Rule: results are passed on as they come, each in a message slot. The scores of a rerank with
``top_n`` are kept here, free their slots at once, and are passed on sorted, at the end.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine.core.common.credit import Credit
from engine.core.common.phases import Phase
from engine.core.common.types import RequestId
from engine.core.encode.types import Encoded, bytes_of_row
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
    return (Score,) if request.top_n is None else ()


# Bytes of the vectors of tokens that wait for one reader, or one text's if that has more; a guess.
MATRICES_BYTES_MAX = 16 * 2**20


class EncodeStream(RequestStream[EncodeEvent]):
    """An Embed or a Rerank request's life on the Trio thread."""

    how_far = "after {0._num_done} of {0.num_inputs} inputs"

    def __init__(self, request: EncodeRequests, options: StreamOptions[EncodeEvent]) -> None:
        if isinstance(request, EmbedRequest):
            self.operation = "embeddings"
            self.num_inputs, self._top_n = len(request.inputs), None
        else:
            self.operation = "rerank"
            self.num_inputs, self._top_n = len(request.documents), request.top_n
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
        """Let as many texts with a vector for each token wait for the reader as
        `MATRICES_BYTES_MAX` has room for."""
        if self._has_matrices and self.replica is not None:
            options = prepared.request.options
            number = options.dimensions or self.replica.info.dimensions
            longest = max(input_.num_tokens for input_ in prepared.request.inputs)
            largest = longest * bytes_of_row(number, options.precision)
            most = max(1, MATRICES_BYTES_MAX // largest)
            self.credit = Credit(min(self.credit.capacity, most))

    # ---- the loop's side

    def push(self, event: OutputEvent) -> None:
        """Take an event of the core; pass results on, or keep scores for the end."""
        if event.__class__ is not Encoded:
            super().push(event)
            return
        self._num_done += 1
        self._note_result(Phase.ENCODE, self.tokens_done + event.tokens)
        if isinstance(self.request, EmbedRequest):
            precision = self.request.precision or "float32"
            _, values, indices, rows = event.result
            vector = Embedding(event.index, values, event.tokens, precision, indices, rows)
            self._reader.push(vector)
            return
        score = Score(event.index, event.result.values[0])
        if self._top_n is None:
            self._reader.push(score)
        elif not self.is_closed:
            self._scores.append(score)
            self.release(1)

    def _admit(self, event: Admitted) -> None:
        if not self._is_begun:
            self._is_begun = True
            self._reader.push(Started(self.request_id, self.model, event.prompt_tokens))

    def _finish(self, event: Finished) -> None:
        best = sorted(self._scores, key=lambda score: (-score.score, score.index))
        for score in best[: self._top_n]:
            self._reader.push(score)
        self._scores.clear()
        self._reader.push(replace(event, request_id=RequestId(self.request_id)))
        self.close(None)
