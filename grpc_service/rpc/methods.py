"""Methods of services, and a dispatcher that serves calls with them."""

from __future__ import annotations

import logging
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
    """

    name: str  # such as helloworld.Greeter/SayHello
    request: type[Message]
    handler: Handler
    takes_stream: bool = False
    judge: Callable[[bytes], None] | None = None


def methods_of(
    service: ServiceDescriptor,
    servicer: object,
    judges: Mapping[str, Callable[[bytes], None]] | None = None,
) -> list[Method]:
    """Return the methods of a service; the handler of each is ``servicer``'s method of its name.
    ``judges`` has ``Method.judge`` by the method's name."""
    return [
        Method(
            f"{service.full_name}/{method.name}",
            GetMessageClass(method.input_type),
            getattr(servicer, method.name),
            method.client_streaming,
            (judges or {}).get(method.name),
        )
        for method in service.methods
    ]


async def read_request(method: Method, call: Call) -> Message:
    """Wait for the one request of a call, and return it.

    Raises:
        MissingMessage: no request was sent.
        InvalidMessage: the bytes are not of the method's type.
        RpcError: as `Call.read` and ``Method.judge``, or the request did not become complete in
            time.
    Cancellation: safe.
    """
    data = await (call.read() if call.request.has_message else _read_in_time(call))
    if data is None:
        raise MissingMessage(f"{method.name} takes one request, and none was sent")
    call.request.close()
    if method.judge is not None:
        method.judge(data)
    try:
        return method.request.FromString(data)
    except DecodeError:
        name = method.request.DESCRIPTOR.full_name
        raise InvalidMessage(f"the bytes sent are not a valid {name}") from None


async def _read_in_time(call: Call) -> bytes | None:
    """Wait for the request for `Limits.request_timeout_s`.

    Raises:
        RpcError: as `Call.read`, or the request did not become complete in time.
    Cancellation: safe.
    """
    limit_s = call.limits.request_timeout_s
    with trio.move_on_after(limit_s):
        return await call.read()
    raise RpcError(
        StatusCode.DEADLINE_EXCEEDED, f"the request was not complete within {limit_s:g} s"
    )


def status_of(error: Exception) -> Status:
    """Return how a call ends whose handler raised ``error``. Anything but an `RpcError` is a bug:
    it is logged, and the client learns nothing of it."""
    if isinstance(error, RpcError):
        return error.status
    log.error("a handler raised an unexpected %s", type(error).__name__, exc_info=error)
    return Status(StatusCode.UNKNOWN, "the server met an unexpected error")


class Dispatcher:
    """Serves calls with methods: `Dispatcher.serve` is an `RpcServer`'s ``serve_call``."""

    def __init__(self, methods: Iterable[Method]) -> None:
        self._methods = {method.name: method for method in methods}

    async def serve(self, call: Call) -> None:
        """Serve one call to its end. Raises nothing.

        Cancellation: this is how the call's client or its deadline ends it.
        """
        try:
            method = self._methods.get(call.method)
            if method is None:
                raise RpcError(StatusCode.UNIMPLEMENTED, f"there is no method {call.method}")
            request = None if method.takes_stream else await read_request(method, call)
            await call.answer(await method.handler(request, call))
        except Disconnected:
            pass
        except Exception as error:
            await call.end(*status_of(error))
