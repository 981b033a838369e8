"""What every RPC passes first and last: who may come in, how large a request may be, what a key may
have at once, its status, and the call's one line in the log.

Rule 1: nothing of a call that is not admitted is parsed. Rule 2: one line per call, at its end,
whatever the end; none of them holds text of a prompt, of an answer, or a key. Rule 3: what a
handler raises becomes a status here, and nowhere else.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections import Counter
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from engine import logs
from engine.errors import InvalidRequest
from grpc_service import access, access_log
from grpc_service.connections import Disconnected
from grpc_service.rpc import Rpc, current
from grpc_service.status import ending_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from google.protobuf.message import Message

    from grpc_service.connections import Context, Method
    from grpc_service.keys import KeyRing
    from grpc_service.tracing import Tracing

LIMITED = "triolet.v1.Inference/"  # the service whose calls count as a key's requests


class Reception:
    """Serves every call with one of ``methods``. ``calls`` counts the ended ones by method and
    status code, but for reflection's. ``keys`` None: no key is needed, nor looked at. ``tracing``
    None: no spans."""

    def __init__(
        self, methods: Iterable[Method], keys: KeyRing | None, tracing: Tracing | None = None
    ) -> None:
        self._methods = {method.name: method for method in methods}
        self._keys = keys
        self._tracing = tracing
        self.calls: Counter[tuple[str, str]] = Counter()

    async def serve(self, context: Context) -> None:
        """Serve one call to its end. Raises nothing.

        Cancellation: it is how the call's client ends it; what runs for it ends.
        """
        method = self._methods.get(context.method)
        if method is None:
            text = f"there is no method {context.method}"
            await context.end(grpc.StatusCode.UNIMPLEMENTED, text)
        elif method.takes_stream:  # reflection
            await self._answer(method, None, context)
        else:
            rpc = Rpc(method.name)
            current.set(rpc)  # the call's own task, and so its own context
            with self._accounting(rpc, context):
                await self._admit(rpc, method, context)

    @contextlib.contextmanager
    def _accounting(self, rpc: Rpc, context: Context) -> Iterator[None]:
        """Count the call and write its line, at its end."""
        started_at = time.monotonic()
        try:
            yield
        finally:
            # one that has no status was ended by its client
            late = grpc.StatusCode.DEADLINE_EXCEEDED if context.is_late else None
            code = (context.code or late or grpc.StatusCode.CANCELLED).name
            self.calls[rpc.method, code] += 1
            fields = access_log.fields_of(rpc, code, context.peer, time.monotonic() - started_at)
            access_log.write(rpc, fields)
            if self._tracing is not None and rpc.method.startswith(access.OURS):
                self._tracing.record(fields, context.metadata, rpc.told_id)

    async def _admit(self, rpc: Rpc, method: Method, context: Context) -> None:
        try:
            rpc.quota = access.admit(rpc.method, context.peer, context.metadata, self._keys)
            request = await _read(method, context)
            rpc.request_id = getattr(request, "request_id", "") or uuid.uuid4().hex
            logs.request_id.set(logs.printable(rpc.request_id))
            quota = rpc.quota if rpc.method.startswith(LIMITED) else None
            if quota is not None:
                quota.enter()
        except Exception as error:
            await context.end(*ending_of(error))
            return
        try:
            await self._answer(method, request, context)
        finally:
            if quota is not None:
                quota.leave()

    async def _answer(self, method: Method, request: Any, context: Context) -> None:
        try:
            answer = await method.behaviour(request, context)
            if answer is None:
                await context.end(grpc.StatusCode.OK)
            else:
                await context.answer(answer)
        except Disconnected:
            pass
        except Exception as error:
            await context.end(*ending_of(error))


async def _read(method: Method, context: Context) -> Message:
    """The request of a call that has one.

    Raises:
        InvalidRequest: there is none, or it is not what the method takes.
    """
    data = await context.read()
    if data is None:
        raise InvalidRequest([], message=f"{method.name} takes a request, and none was sent")
    try:
        return method.request.FromString(data)
    except DecodeError:
        name = method.request.DESCRIPTOR.full_name
        raise InvalidRequest([], message=f"the bytes sent are not a valid {name}") from None
