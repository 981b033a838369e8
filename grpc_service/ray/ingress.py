"""Adds Inference to the gRPC server of Ray Serve's proxy (`grpc_servicer_functions`).

Serve passes each call to a replica, with the request and a copy of the call's context, which has no
deadline. Serve sends a status that the replica sets on the copy only if a message comes with it. So
this file adds the time that the client will wait to the metadata that Serve passes, and drops the
message that comes with a failure, since it is empty. A failure whose status no replica has set is
Serve's own; this file adds its details.

Serve cancels a replica's work only if the cancellation comes while Serve waits for the next
message; one that comes while a message is written would leave the replica working in vain. So a
task of its own reads each stream. It only waits for messages, and is cancelled when the call ends.

The values of a request's lists and maps are counted in its bytes, as by the server, before objects
are made of them: a message of millions would stop the proxy for every client. Rule: requests over
`SMALL_BYTES` are parsed in a thread, one at a time; the thread shares no objects.

Serve passes one message of a request. A method whose request is a stream is refused by its name.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from engine.errors import (
    InvalidRequest,
    NoWorkers,
    Overloaded,
    TrioletError,
    Unsupported,
    WorkerLost,
)
from grpc_service._generated.triolet.v1 import inference_pb2_grpc
from grpc_service._generated.triolet.v1.count_limits import COUNT_LIMITS
from grpc_service.access.decoding import SMALL_BYTES
from grpc_service.services.error_status import status_of
from grpc_service.services.methods import INFERENCE
from grpc_service.services.value_counts import judges_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    Read = Callable[[bytes], Awaitable[Any]]
    Stream = Callable[[Any, Any], AsyncIterator[bytes]]
    Unary = Callable[[Any, Any], Awaitable[bytes]]

REMAINING_KEY = "triolet-remaining-s"  # the seconds until the client's deadline

# Our errors for Serve's own statuses. Serve reports a replica that died as INTERNAL.
SERVES_OWN: dict[grpc.StatusCode, Callable[[], TrioletError]] = {
    grpc.StatusCode.INTERNAL: lambda: WorkerLost("the replica was lost; send the request again"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: lambda: Overloaded("all replicas have enough requests"),
    grpc.StatusCode.UNAVAILABLE: lambda: NoWorkers("there is no replica"),
}
READ_ONCE = ("peer", "auth_context", "peer_identities", "peer_identity_key")
CODES = {code.value[0]: code for code in grpc.StatusCode}
INSTEAD = {"EmbedStream": "Embed"}  # for methods whose requests are streams
JUDGES = judges_of(INFERENCE, COUNT_LIMITS)


def add_inference(servicer: Any, server: Any) -> None:
    """Add the methods of Inference to Serve's gRPC server."""
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, _Registrar(server))


class _Registrar:
    """Takes the generated code's handlers, and adds to Serve's server a `_Handler` around them."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Add the methods. Serve replaces their functions by its own, which `_Handler` calls."""
        [handler] = handlers
        self._server.add_generic_rpc_handlers((_Handler(handler),))

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """Do nothing: these would come before our generic handler."""


class _Handler(grpc.GenericRpcHandler):
    """The methods of a service, with the name `_method_handlers` by which Serve replaces them."""

    def __init__(self, handler: Any) -> None:
        self._method_handlers: dict[str, Any] = handler._method_handlers
        self._reading = asyncio.Lock()  # held while a thread reads a request

    def service(self, details: Any) -> Any:
        """Return the handler of a call, or None for another service's."""
        handler = self._method_handlers.get(details.method)
        if handler is None:
            return None
        name = details.method.rpartition("/")[2]
        if handler.request_streaming:
            return handler._replace(request_deserializer=None, stream_stream=_refusing(name))
        read = partial(self._read, partial(_parse, name, handler.request_deserializer))
        handler = handler._replace(request_deserializer=None)
        if handler.response_streaming:
            return handler._replace(unary_stream=_stream(handler.unary_stream, read))
        return handler._replace(unary_unary=_unary(handler.unary_unary, read))

    async def _read(self, parse: Callable[[bytes], Any], data: bytes) -> Any:
        """Return a request's message: read here if it is small, otherwise in a thread, one request
        after another.

        Raises:
            InvalidRequest: the bytes are no message, or it has too many values.
        Cancellation: safe; the thread goes on to its end.
        """
        if len(data) <= SMALL_BYTES:
            return parse(data)
        async with self._reading:
            return await asyncio.to_thread(parse, data)


def _parse(name: str, parse: Callable[[bytes], Any], data: bytes) -> Any:
    JUDGES[name](data)
    try:
        return parse(data)
    except DecodeError:
        raise InvalidRequest([], message=f"the bytes sent are no request of {name}") from None


def _refusing(name: str) -> Stream:
    async def refuse(_: Any, context: Any) -> AsyncIterator[bytes]:
        what = f"{name} is not served behind Ray Serve, which passes on one message of a request"
        _Call(context).fail(Unsupported(f"{what}; send {INSTEAD[name]} requests"))
        return
        yield

    return refuse


def _stream(serve: Stream, read: Read) -> Stream:
    async def answer(data: bytes, context: Any) -> AsyncIterator[bytes]:
        call = _Call(context)
        try:
            request = await read(data)
        except TrioletError as error:
            call.fail(error)
            return
        messages: asyncio.Queue[bytes | None] = asyncio.Queue()
        reading = asyncio.create_task(_read(serve, request, call, messages))
        context.add_done_callback(lambda _: reading.cancel())
        while (message := await messages.get()) is not None:
            yield message
        await reading
        call.explain()

    return answer


async def _read(
    serve: Stream, request: Any, call: _Call, messages: asyncio.Queue[bytes | None]
) -> None:
    """Put the messages for the client into the queue, and None at the end. Serve's proxy keeps what
    a replica sends without a bound, and so does the queue."""
    try:
        async for message in serve(request, call):
            if not call.has_failed:
                messages.put_nowait(message)
    finally:
        messages.put_nowait(None)


def _unary(serve: Unary, read: Read) -> Unary:
    async def answer(data: bytes, context: Any) -> bytes:
        call = _Call(context)
        try:
            message = await serve(await read(data), call)
        except TrioletError as error:
            call.fail(error)
            return b""
        call.explain()
        return message

    return answer


class _Call:
    """A call's context, as Serve sees it, also after the call has ended.

    What is read from the connection is read once, at the beginning: grpc crashes if it is asked for
    the peer of a call that has ended, which Serve does.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._metadata = _with_remaining(context)
        self._read = {name: getattr(context, name)() for name in READ_ONCE}

    def __getattr__(self, name: str) -> Any:
        if name in READ_ONCE:
            return lambda: self._read[name]
        return getattr(self._context, name)

    def invocation_metadata(self) -> list[tuple[str, Any]]:
        """Return the client's metadata, and how long the client will wait."""
        return self._metadata

    @property
    def has_failed(self) -> bool:
        """Whether the call has a status other than OK."""
        return self._context.code() not in (None, 0, grpc.StatusCode.OK)

    def explain(self) -> None:
        """Add Triolet's details to a failure that has none, because its status is Serve's own."""
        code = self._context.code()
        code = CODES.get(code, code)
        sent = self._context.trailing_metadata() or ()
        if code in SERVES_OWN and not any(key.endswith("-bin") for key, _ in sent):
            self.fail(SERVES_OWN[code](), sent)

    def fail(self, error: TrioletError, sent: Sequence[tuple[str, Any]] = ()) -> None:
        """Give the call the status of an error, beside its metadata ``sent`` so far."""
        status = status_of(error)
        self._context.set_code(CODES[int(status.code)])
        self._context.set_details(status.message)
        self._context.set_trailing_metadata((*sent, *status.metadata))


def _with_remaining(context: Any) -> list[tuple[str, Any]]:
    sent = [pair for pair in context.invocation_metadata() or () if pair[0] != REMAINING_KEY]
    remaining_s = context.time_remaining()
    return sent if remaining_s is None else [*sent, (REMAINING_KEY, repr(remaining_s))]
