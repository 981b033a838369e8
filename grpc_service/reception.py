"""What every RPC passes first and last: who may come in, how large a request may be, what a key may
have at once, and the call's one line in the log.

Rule 1: nothing of a call that is not admitted is parsed. Rule 2: one line per call, at its end,
whatever the end; none of them holds text of a prompt, of an answer, or a key.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from typing import TYPE_CHECKING, Any, NoReturn, cast

import grpc

from engine import logs
from engine.errors import RequestTooLarge, TrioletError
from grpc_service import access, access_log
from grpc_service.rpc import Rpc, current
from grpc_service.servicer import _abort

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from engine.quota import Quota
    from grpc_service.keys import KeyRing
    from grpc_service.tracing import Tracing

    Context = grpc.aio.ServicerContext[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]
    Behaviour = Callable[[Any, Context], Awaitable[Any]]
    Details = grpc.HandlerCallDetails

LIMITED = "triolet.v1.Inference/"  # the service whose calls count as a key's requests


class Reception(grpc.aio.ServerInterceptor):
    """grpc.aio's interceptor. ``calls`` counts the ended ones by method and status code; asyncio's
    thread only. ``keys`` None: no key is needed, nor looked at. ``tracing`` None: no spans."""

    def __init__(
        self, keys: KeyRing | None, max_message_bytes: int, tracing: Tracing | None = None
    ) -> None:
        self._keys = keys
        self._tracing = tracing
        self._max_message_bytes = max_message_bytes
        self.calls: Counter[tuple[str, str]] = Counter()

    async def intercept_service(
        self, continuation: Callable[[Details], Awaitable[Handler | None]], details: Details
    ) -> Handler | None:
        handler: Any = await continuation(details)
        if handler is None or handler.request_streaming:  # unknown; reflection
            return cast("Handler | None", handler)
        method = str(details.method).removeprefix("/")
        behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary
        served = self._served(method, behaviour, details.invocation_metadata or ())
        if method.startswith(access.OURS):
            handler = handler._replace(request_deserializer=self._sized(handler))
        name = "unary_stream" if handler.response_streaming else "unary_unary"
        return cast("Handler", handler._replace(**{name: served}))

    def _served(self, method: str, behaviour: Behaviour, metadata: Any) -> Behaviour:
        async def serve(request: Any, context: Context) -> Any:
            rpc = Rpc(method)
            current.set(rpc)  # the call's own task, and so its own context
            started_at, ended_by_client = time.monotonic(), False
            try:
                rpc.quota = await self._admitted(rpc, context, metadata)
                message = request() if isinstance(request, _Unparsed) else request
                rpc.request_id = getattr(message, "request_id", "") or uuid.uuid4().hex
                logs.request_id.set(logs.printable(rpc.request_id))
                return await self._run(rpc, behaviour, message, context)
            except asyncio.CancelledError:
                ended_by_client = True
                raise
            finally:
                code = "CANCELLED" if ended_by_client else _code(context)
                self.calls[method, code] += 1
                fields = access_log.fields_of(
                    rpc, code, context.peer(), time.monotonic() - started_at
                )
                access_log.write(rpc, fields)
                if self._tracing is not None and method.startswith(access.OURS):
                    self._tracing.record(fields, metadata, rpc.told_id)

        return serve

    async def _admitted(self, rpc: Rpc, context: Context, metadata: Any) -> Quota | None:
        try:
            return access.admit(rpc.method, context.peer(), metadata, self._keys)
        except TrioletError as error:
            await _refuse(context, error)

    async def _run(self, rpc: Rpc, behaviour: Behaviour, message: Any, context: Context) -> Any:
        quota = rpc.quota
        if quota is None or not rpc.method.startswith(LIMITED):
            return await behaviour(message, context)
        try:
            quota.enter()
        except TrioletError as error:
            await _refuse(context, error)
        try:
            return await behaviour(message, context)
        finally:
            quota.leave()

    def _sized(self, handler: Any) -> Callable[[bytes], _Unparsed]:
        parse, limit = handler.request_deserializer, self._max_message_bytes

        def take(data: bytes) -> _Unparsed:
            if len(data) <= limit:
                return _Unparsed(lambda: parse(data))
            error = RequestTooLarge(
                [],
                message=f"the request has {len(data)} bytes, of at most {limit} "
                "(--max-message-bytes)",
            )
            return _Unparsed(lambda: error)

        return take


async def _refuse(context: Context, error: TrioletError) -> NoReturn:
    """End the call with the status of ``error``; whether its client still hears of it or not."""
    await _abort(context, error)
    raise asyncio.CancelledError


class _Unparsed:
    """A request's message, parsed when the call has been admitted."""

    __slots__ = ("_parse",)

    def __init__(self, parse: Callable[[], Any]) -> None:
        self._parse = parse

    def __call__(self) -> Any:
        return self._parse()


def _code(context: Context) -> str:
    """The name of the status that the handler left."""
    code: Any = context.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    names = {one.value[0]: one.name for one in grpc.StatusCode}
    return names.get(code or 0, "UNKNOWN")
