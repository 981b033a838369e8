"""The stream of a request whose inputs come one after the other, any number of them: EmbedStream.

An `EmbedFeed` reads inputs from its request's source and submits them in chunks, each as an Embed
request of its own; so steps have the inputs of several chunks and of other requests, as always.

Rule 1: the source is read only while the window has room: inputs without a result that the reader
has taken. Rule 2: each input has one result, a vector or an `InputFault`. An error that names
inputs of a chunk, or that an input alone has, is theirs; the others of the chunk are computed. Any
other error ends the stream. Rule 3: a chunk that finds the queue full waits, once an earlier one
has been admitted. A drain refuses new chunks, and those that run come to their end. Rule 4: chunks
only note what happens to them; `EmbedFeed.serve` alone acts on it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import trio

from engine.core.common.phases import Phase
from engine.core.common.types import EndReason
from engine.errors import (
    InvalidRequest,
    MemoryExhausted,
    Overloaded,
    RequestTooLarge,
    ShuttingDown,
    StepFailed,
    TrioletError,
)
from engine.requests.encode.values import (
    MAX_INPUTS,
    Embedding,
    EmbedStreamEvent,
    EmbedStreamRequest,
    IndexedInput,
    InputFault,
)
from engine.requests.stream import RequestStream
from engine.requests.text.values import Started

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from engine.core.common.events import Finished
    from engine.requests.encode.values import EncodeEvent
    from engine.requests.stream import StreamOptions

    Submit = Callable[..., RequestStream[EncodeEvent]]

# The window: two steps of short texts, twice, so that a step never waits for the client's next
# inputs; and the bytes of a message. A message that begins in the window may go beyond it. Guesses.
WINDOW_INPUTS = 2048
WINDOW_BYTES = 4 * 2**20
# A chunk: inputs of similar length are neighbours in a step, as a chunk is sorted. Guesses.
CHUNK_INPUTS = 512
CHUNK_BYTES = 2**20
CHUNK_IMAGES = 64  # as many as the client sends in a request; see `ImageMemory`
CHUNKS_MAX = 4  # chunks that run, of which some are tokenised while others are computed
# With fewer chunks that run, a chunk is begun with the inputs that are there. With more, it waits
# until it is full, so that single inputs are not requests of their own.
CHUNKS_MIN = 2
RETRY_S = 1.0  # the wait for room in the queue, if the error does not say how long
# Steps that may fail in turn: to find one input of a chunk takes 10. A model that fails on
# everything ends the stream soon.
FAILURES_MAX = 16
PLACE = re.compile(r"inputs\[(\d+)\]\.?(.*)")


class _Chunk:
    """Inputs that run as one Embed request; the `Reader` of its stream. ``left`` are the places of
    those without a result."""

    def __init__(self, feed: EmbedFeed, items: Sequence[IndexedInput]) -> None:
        self._feed = feed
        self.items = items
        self.left = dict.fromkeys(range(len(items)))
        self.num_bytes = sum(item.num_bytes for item in items)
        self.images = [place for place, item in enumerate(items) if type(item.input) is bytes]
        self.stream: RequestStream[EncodeEvent] | None = None
        self.error: TrioletError | None = None

    def push(self, event: Any) -> None:
        """Pass on a vector by its input's own index."""
        if event.__class__ is Embedding:
            del self.left[event.index]
            self._feed.take_vector(self, event._replace(index=self.items[event.index].index))
        elif isinstance(event, Started):
            self._feed.begin(event.model)

    def end(self, error: TrioletError | None) -> None:
        """Let the feed act on the end."""
        self.error = error
        self._feed.note_end(self)


class EmbedFeed(RequestStream[EmbedStreamEvent]):
    """An EmbedStream request's life on the Trio thread. ``submit`` is `Supervisor.submit`. A reader
    that takes nothing for ``stall_timeout_s``, while the window is full of results, ends it."""

    operation = "embeddings"
    how_far = "after {0._num_done} inputs"
    result_types = (Embedding,)

    def __init__(
        self,
        request: EmbedStreamRequest,
        options: StreamOptions[EmbedStreamEvent],
        submit: Submit,
        stall_timeout_s: float,
    ) -> None:
        super().__init__(
            request,
            options,
            num_beside=WINDOW_INPUTS + MAX_INPUTS + 1,
            credited=(Embedding, InputFault),
        )
        self._submit = submit
        self._stall_timeout_s = stall_timeout_s
        self._numbers = itertools.count(1)  # of chunks
        self._pending: deque[IndexedInput] = deque()  # inputs that are in no chunk
        self._again: deque[list[IndexedInput]] = deque()  # chunks that failed and run again
        self._chunks: dict[_Chunk, None] = {}  # chunks that run, in order
        self._ended: list[_Chunk] = []  # chunks whose end was not acted on
        # Of each result that the reader has not taken, the stream that holds its message slot.
        self._slots: deque[RequestStream[EncodeEvent] | None] = deque()
        self._num_open = 0  # inputs without a result that the reader has taken
        self._open_bytes = 0  # bytes of the inputs that have no result
        self._pending_bytes = 0
        self._num_done = 0
        self._num_failures = 0  # steps that failed since the last result
        self._released_at = self.started_at
        self._retry_at = -math.inf
        self._failure: TrioletError | None = None
        self._has_read = False  # the source has ended
        self._is_over = False
        self._wake = trio.Event()
        self._room = trio.Event()

    # ---- the request's task

    async def serve(self) -> None:
        """Read the source and have every input computed.

        Raises:
            TrioletError: an error that is not of single inputs.
        Cancellation: ends the chunks that run.
        """
        self.phase = Phase.ENCODE
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read, self.request.source)
                await self._run_chunks()
                nursery.cancel_scope.cancel()
        finally:
            self._is_over = True
            otherwise = EndReason.DEADLINE if self._failure is None else EndReason.CANCELLED
            for chunk in self._chunks:
                if chunk.stream is not None:
                    chunk.stream.cancel(self.reason or otherwise)
            self.request = replace(self.request, source=None)  # it may refer to the call, and back
        if self._failure is not None:
            raise self._failure
        self.close(None)

    async def _read(self, source: Callable[[], Any]) -> None:
        """Take inputs from the source while there is room for them, until its end."""
        try:
            while self._failure is None:
                while self._num_open >= WINDOW_INPUTS or self._open_bytes >= WINDOW_BYTES:
                    self._room = trio.Event()
                    await self._room.wait()
                await trio.lowlevel.checkpoint()
                items = await source()
                if items is None:
                    break
                self._take_inputs(items)
        except TrioletError as error:
            self._failure = self._failure or error
        self._has_read = True
        self._wake.set()

    def _take_inputs(self, items: Iterable[IndexedInput]) -> None:
        for item in items:
            self._num_open += 1
            if item.input is None:
                what = "set exactly one of text, token_ids and image"
                self._give_fault(item, InvalidRequest.reason, what)
                continue
            self._open_bytes += item.num_bytes
            self._pending_bytes += item.num_bytes
            self._pending.append(item)
        self._wake.set()

    async def _run_chunks(self) -> None:
        """Submit chunks and act on their ends until all is done, or the stream has failed."""
        while True:
            for chunk in self._take_ended():
                self._settle(chunk)
            if self._is_done():
                return
            self._submit_some()
            with trio.move_on_at(self._next_look()):
                await self._wake.wait()
            self._wake = trio.Event()
            if self._is_stalled():
                self.cancel(EndReason.STALLED)

    def _take_ended(self) -> list[_Chunk]:
        ended, self._ended = self._ended, []
        return ended

    def _is_done(self) -> bool:
        if self._failure is not None and not isinstance(self._failure, ShuttingDown):
            return True
        if self._chunks or self._ended:
            return False
        return self._failure is not None or (
            self._has_read and not self._pending and not self._again
        )

    def _next_look(self) -> float:
        """Return when to look again even if nothing has happened."""
        if (self._again or self._pending) and self._retry_at > trio.current_time():
            return self._retry_at
        return self._stalls_at()

    def _stalls_at(self) -> float:
        """Return when the reader will have taken nothing for too long; infinity while something
        else than the reader is waited for."""
        if self._chunks or self._ended or self._pending or self._again or not self._is_full():
            return math.inf
        return self._released_at + self._stall_timeout_s

    def _is_stalled(self) -> bool:
        return trio.current_time() >= self._stalls_at()

    def _is_full(self) -> bool:
        return self._num_open >= WINDOW_INPUTS

    # ---- chunks

    def _submit_some(self) -> None:
        if trio.current_time() < self._retry_at:
            return
        most = CHUNKS_MAX if self._is_begun else 1  # the first one decides on the model
        while self._failure is None and len(self._chunks) < most and not self._ended:
            if self._again:
                items = self._again.popleft()
            elif self._pending and self._is_chunk_due():
                items = self._next_chunk()
            else:
                return
            self._submit_chunk(items)

    def _is_chunk_due(self) -> bool:
        is_full = len(self._pending) >= CHUNK_INPUTS or self._pending_bytes >= CHUNK_BYTES
        return is_full or len(self._chunks) < CHUNKS_MIN

    def _next_chunk(self) -> list[IndexedInput]:
        items: list[IndexedInput] = []
        num_bytes = num_images = 0
        is_model_open = not (self._is_begun or self.model or self.request.model)
        while self._pending and len(items) < CHUNK_INPUTS:
            item = self._pending[0]
            num_bytes += item.num_bytes
            num_images += isinstance(item.input, bytes)
            if items and (num_bytes > CHUNK_BYTES or num_images > CHUNK_IMAGES):
                break
            if is_model_open and num_images not in (0, len(items) + 1):
                break  # the first input decides on the model, not what comes soon after it
            items.append(self._pending.popleft())
            self._pending_bytes -= item.num_bytes
        return items

    def _submit_chunk(self, items: list[IndexedInput]) -> None:
        chunk = _Chunk(self, items)
        parameters = self.request.parameters
        request = replace(
            parameters,
            inputs=tuple(item.input for item in items),
            model=self.model or parameters.model,
            request_id="",
            timeout_s=None,
            check=False,
        )
        # No client's id has this separator (`Supervisor._core_id`).
        origin = replace(self.origin, fallback_id=f"{self.core_id}\x1f{next(self._numbers)}")
        self._chunks[chunk] = None
        chunk.stream = self._submit(
            request, buffer=len(items), reader=chunk, part_of=self, origin=origin
        )

    def _settle(self, chunk: _Chunk) -> None:
        """Act on a chunk's end."""
        error = chunk.error
        left = [chunk.items[place] for place in chunk.left]
        self._open_bytes -= chunk.num_bytes - sum(item.num_bytes for item in left)
        match error:
            case None:
                assert not left, "a request that succeeds has a result for each input"
                self._retry_at = -math.inf  # the queue has room again
            case InvalidRequest():
                self._sort_out(chunk, error, left)
            case StepFailed() if self._num_failures < FAILURES_MAX:
                self._num_failures += 1
                self._halve(left, error)
            case Overloaded() | MemoryExhausted() if self._is_begun:
                self._again.append(left)
                self._retry_at = trio.current_time() + (error.retry_after_s or RETRY_S)
            case _:
                self._failure = self._failure or error
        self._room.set()

    def _sort_out(self, chunk: _Chunk, error: InvalidRequest, left: Sequence[IndexedInput]) -> None:
        """Give the inputs that a refusal names their errors, and let the others run again."""
        faults: dict[int, str] = {}
        for violation in error.violations:
            if found := PLACE.match(violation.field):
                faults.setdefault(int(found[1]), _named(found[2], violation.description))
            elif violation.field == "model" and self._may_take_texts(chunk):
                what = _named("image", violation.description)
                faults |= dict.fromkeys(chunk.images, what)
            elif isinstance(error, RequestTooLarge) and len(left) > 1:
                self._halve(left, error)
                return
            else:
                self._failure = error.renamed(lambda field: f"parameters.{field}")
                return
        if not faults:
            self._failure = error
            return
        for place, what in faults.items():
            self._open_bytes -= chunk.items[place].num_bytes
            self._give_fault(chunk.items[place], error.reason, what)
        if rest := [chunk.items[place] for place in chunk.left if place not in faults]:
            self._again.append(rest)

    def _may_take_texts(self, chunk: _Chunk) -> bool:
        """Return whether only a chunk's images may be the cause that the model is refused."""
        return bool(chunk.images) and (self._is_begun or len(chunk.images) < len(chunk.items))

    def _halve(self, left: Sequence[IndexedInput], error: TrioletError) -> None:
        """Let inputs run again in two halves, to find the one that fails; one alone fails."""
        if len(left) == 1:
            self._open_bytes -= left[0].num_bytes
            self._give_fault(left[0], error.reason, str(error))
            return
        middle = len(left) // 2
        self._again += [list(left[:middle]), list(left[middle:])]

    def _give_fault(self, item: IndexedInput, reason: str, what: str) -> None:
        self._num_done += 1
        self._slots.append(None)
        self._reader.push(InputFault(item.index, reason, what))

    # ---- what chunks note

    def begin(self, model: str) -> None:
        """Note that a chunk was admitted, by ``model``."""
        if not self._is_begun and not self._is_over:
            self._is_begun = True
            self.model = model
            self._wake.set()
            self._reader.push(Started(self.request_id, model, 0))

    def take_vector(self, chunk: _Chunk, vector: Embedding) -> None:
        """Pass on a vector, whose message slot ``chunk`` has."""
        if self._is_over:
            return
        self._num_done += 1
        self.num_made += 1
        self._num_failures = 0
        self._note_result(Phase.ENCODE, self.tokens_done + vector.tokens)
        self._slots.append(chunk.stream)
        self._reader.push(vector)

    def note_end(self, chunk: _Chunk) -> None:
        """Note that a chunk has ended."""
        self._chunks.pop(chunk, None)
        if not self._is_over:
            self._ended.append(chunk)
            self._wake.set()

    # ---- the reader's side

    def release(self, num_messages: int) -> None:
        """Free the message slots of results that the reader has taken, and their place in the
        window."""
        for _ in range(num_messages):
            stream = self._slots.popleft()
            if stream is not None:
                stream.release(1)
        self._num_open -= num_messages
        self._released_at = trio.current_time()
        self._room.set()

    def _finish(self, event: Finished) -> None:
        raise AssertionError("a feed is at no replica itself")


def _named(field: str, what: str) -> str:
    """Return what is wrong with a field of an input, or with the whole input if it is empty."""
    return f"{field}: {what}" if field else what
