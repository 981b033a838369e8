"""An Embed's or a Rerank's life on the Trio thread: what `engine.generation.Lifetime` leaves open.

Rule 1: as there. Rule 2: results go out as they come, each in a slot of the stream's credit; those
of a rerank with ``top_n`` are kept here, their slots given back at once, and go sorted at the end.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine.core.types import RequestId
from engine.encode_requests import (
    Embedding,
    EmbedRequest,
    EncodeEvent,
    EncodeRequests,
    Score,
)
from engine.generation import Lifetime
from engine.requests import Started

if TYPE_CHECKING:
    from engine.core.encode_types import Encoded
    from engine.core.events import Admitted, Finished


def credited_by(request: EncodeRequests) -> tuple[type, ...]:
    """The kinds of a request's events that hold a slot of its stream."""
    if isinstance(request, EmbedRequest):
        return (Embedding,)
    return (Score,) if request.top_n is None else ()


class Encoding(Lifetime[EncodeEvent]):
    """An encode request's life: Started, an Embedding or a Score for each input as it is ready, and
    Finished."""

    def __init__(
        self, request: EncodeRequests, request_id: str, core_id: RequestId, buffer: int
    ) -> None:
        self.request = request
        if isinstance(request, EmbedRequest):
            self.num_inputs, self._top_n = len(request.inputs), None
        else:
            self.num_inputs, self._top_n = len(request.documents), request.top_n
        self._num_done = 0
        self._scores: list[Score] = []
        num_kept = min(self.num_inputs, self._top_n or 0)
        super().__init__(
            request_id,
            core_id,
            buffer=buffer,
            num_beside=2 + max(0, num_kept),  # Started, Finished, and what is sent at the end
            credited=credited_by(request),
        )

    # ---- the loop's side

    def on_admitted(self, event: Admitted) -> None:
        self.phase = "queued"
        self._prompt_tokens = event.prompt_tokens
        if not self._is_begun:
            self._is_begun = True
            self._push(Started(self.request_id, self.model, event.prompt_tokens))

    def on_encoded(self, event: Encoded) -> None:
        self.phase = "encode"
        self._num_done += 1
        self.tokens_done += event.tokens
        if self._first_result_at is None:
            self._note_first_result()
        if isinstance(self.request, EmbedRequest):
            self._push(Embedding(event.index, event.values, event.tokens))
            return
        score = Score(event.index, event.values[0])
        if self._top_n is None:
            self._push(score)
        elif not self.is_closed:
            self._scores.append(score)
            self.release(1)

    def on_finished(self, event: Finished) -> None:
        if not event.reason.is_success:
            self._end_early(event)
            return
        best = sorted(self._scores, key=lambda one: (-one.score, one.index))
        for score in best[: self._top_n]:
            self._push(score)
        self._scores.clear()
        timings = self._note_finish(event)
        self._push(replace(event, request_id=RequestId(self.request_id), timings=timings))
        self.close(None)

    def _progress(self) -> str:
        return f"after {self._num_done} of {self.num_inputs} inputs"
