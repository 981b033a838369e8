"""Methods of services, and a dispatcher that serves calls with them."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import trio
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from grpc_service.rpc.errors import Disconnected, InvalidMessage, MissingMessage, RpcError
from grpc_service.rpc.status import Status, StatusCode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from google.protobuf.descriptor import ServiceDescriptor
    from google.protobuf.message import Message

    from grpc_service.rpc.call import Call

    Handler = Callable[[Any, Any], Awaitable[Message | None]]

log = logging.getLogger(__name__)


class Method(NamedTuple):
    """A method of a service.

    ``handler`` takes the request and the call; an own dispatcher may pass something else for the
    call. It returns the answer, or writes all messages itself and returns None. With
    ``takes_stream`` the request is None, and the handler reads the messages itself (`Call.read`).
    ``judge`` is called with the request's bytes before they are parsed; it may raise an `RpcError`.
    ``translate`` returns, for a call, a function from the parsed message to the value that the
    handler takes instead. That function and ``judge`` may run in a thread.
    """

    name: str  # such as helloworld.Greeter/SayHello
    request: type[Message]
    handler: Handler
    takes_stream: bool = False
    judge: Callable[[bytes], None] | None = None
    translate: Callable[[Call], Callable[[Any], Any]] | None = None


def methods_of(
    service: ServiceDescriptor,
    servicer: object,
    judges: Mapping[str, Callable[[bytes], None]] | None = None,
    translators: Mapping[str, Callable[[Call], Callable[[Any], Any]]] | None = None,
) -> list[Method]:
    """Return the methods of a service; the handler of each is ``servicer``'s method of its name.
    ``judges`` has ``Method.judge``, and ``translators`` ``Method.translate``, by the method's name.
    """
    return [
        Method(
            f"{service.full_name}/{method.name}",
            GetMessageClass(method.input_type),
            getattr(servicer, method.name),
            method.client_streaming,
            (judges or {}).get(method.name),
            (translators or {}).get(method.name),
        )
        for method in service.methods
    ]


async def read_request(method: Method, call: Call) -> Any:
    """Wait for the one request of a call, and return what the handler takes.

    Raises:
        MissingMessage: no request was sent.
        InvalidMessage: the bytes are not of the method's type.
        RpcError: the request was refused (`Call.read`, ``Method.judge``), or did not become
            complete in time.
    Cancellation: safe.
    """
    decode = await wait_for_request(method, call)
    return decode(await take_request(method, call))


async def wait_for_request(method: Method, call: Call) -> Callable[[bytes], Any]:
    """Wait until the one request of a call has come, for `Limits.request_timeout_s`, and return its
    `decoder_of`.

    Raises:
        MissingMessage: no request was sent.
        RpcError: the request was refused (`Call.read`), or did not become complete in time.
    Cancellation: safe.
    """
    if not call.request.has_message:
        limit_s = call.limits.request_timeout_s
        with trio.move_on_after(limit_s) as patience:
            if await call.read(stays=True) is None:
                raise MissingMessage(f"{method.name} takes one request, and none was sent")
        if patience.cancelled_caught:
            raise RpcError(
                StatusCode.DEADLINE_EXCEEDED, f"the request was not complete within {limit_s:g} s"
            )
    return decoder_of(method, call)


async def take_request(method: Method, call: Call) -> bytes:
    """Return the request after `wait_for_request`. No more messages of the call are taken, unless
    the request is a stream.

    Raises:
        RpcError: the request was given up since, as the server keeps too many bytes.
    Cancellation: safe.
    """
    data = await call.read()
    if data is None:
        raise MissingMessage(f"{method.name} takes one request, and none was sent")
    if not method.takes_stream:
        call.request.close()
    return data


def decoder_of(method: Method, call: Call) -> Callable[[bytes], Any]:
    """Return a function from the bytes of a call's request to the value that the handler takes. It
    may run in a thread. It raises InvalidMessage for bytes that are not of the method's type, and
    what ``Method.judge`` and ``Method.translate`` raise."""
    return partial(_decode, method, None if method.translate is None else method.translate(call))


def _decode(method: Method, translate: Callable[[Any], Any] | None, data: bytes) -> Any:
    if method.judge is not None:
        method.judge(data)
    try:
        message = method.request.FromString(data)
    except DecodeError:
        name = method.request.DESCRIPTOR.full_name
        raise InvalidMessage(f"the bytes sent are not a valid {name}") from None
    return message if translate is None else translate(message)


def status_of(error: Exception) -> Status:
    """Return how a call ends whose handler raised ``error``. Anything but an `RpcError` is a bug:
    it is logged, and the client learns nothing of it."""
    if isinstance(error, RpcError):
        return error.status
    log.error("a handler raised an unexpected %s", type(error).__name__, exc_info=error)
    return Status(StatusCode.UNKNOWN, "the server met an unexpected error")


class Dispatcher:
    """Serves calls with methods: `Dispatcher.serve` is an `RpcServer`'s ``serve_call``. A subclass
    may do more for each call in `handle`, and around `serve`. ``status_of`` returns the status for
    an error.
    """

    def __init__(
        self, methods: Iterable[Method], status_of: Callable[[Exception], Status] = status_of
    ) -> None:
        self.methods = {method.name: method for method in methods}
        self._status_of = status_of

    async def serve(self, call: Call) -> None:
        """Serve one call to its end. Raises nothing.

        Cancellation: this is how the call's client or its deadline ends it.
        """
        method = self.methods.get(call.method)
        if method is None:
            await call.end(StatusCode.UNIMPLEMENTED, f"there is no method {call.method}")
            return
        try:
            await call.answer(await self.handle(method, call))
        except Disconnected:
            pass
        except Exception as error:
            await call.end(*self._status_of(error))

    async def handle(self, method: Method, call: Call) -> Message | None:
        """Read the request, and return the handler's answer.

        Raises: as `read_request` and the handler.
        Cancellation: the call's client or its deadline ends it (`serve`).
        """
        request = None if method.takes_stream else await read_request(method, call)
        return await method.handler(request, call)
