"""The stream of one request's events for Trio programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import trio

from engine.errors import RequestCancelled

if TYPE_CHECKING:
    from typing import Self

    from engine.api.engine import Engine
    from engine.requests.kind import ClientRequest
    from engine.requests.stream import RequestStream

EventT = TypeVar("EventT")


class Stream(Generic[EventT]):
    """The events of one request: Started; Tokens, or an Embedding or Score for each input, or the
    progress and the images of a drawing; and one Finished for each choice.

    The request begins when the block of ``async with`` is entered, and ends at the latest when the
    block is left. Iterating ends after the last event of a request that succeeded, and raises its
    `TrioletError` after the last event of one that did not.
    """

    def __init__(self, engine: Engine, request: ClientRequest) -> None:
        self._engine = engine
        self._request = request
        self._entered: RequestStream[Any] | None = None

    async def __aenter__(self) -> Self:
        if self._entered is not None:
            raise RuntimeError("a stream is of one request: its block can be entered once")
        self._entered = self._engine.submit(
            self._request,
            buffer=self._engine.config.in_process_buffer,
            awaits_reader=True,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stream.close_reader()

    @property
    def _stream(self) -> RequestStream[Any]:
        if self._entered is None:
            raise RuntimeError("a stream is read inside its block: `async with … as stream`")
        return self._entered

    @property
    def request_id(self) -> str:
        """The request's id: the client's, or one that was made for it."""
        return self._stream.request_id

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> EventT:
        """Return the next event.

        Cancellation: no event is lost.
        """
        stream = self._stream
        try:
            event: EventT = await stream.receive()
            return event
        except trio.EndOfChannel:
            if stream.error is not None:
                raise stream.error from None
            raise StopAsyncIteration from None
        except trio.ClosedResourceError:
            raise RequestCancelled("the block of the stream was left") from None
