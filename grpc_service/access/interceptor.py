"""What happens to every RPC before and after its handler: admission, the key's limits, the status,
the access log.

Rule 1: nothing of a call that is not admitted is parsed. Rule 2: every call leaves one line in the
log when it ends, however it ends; no line holds text of a prompt or of an answer, or a key.
Rule 3: what a handler raises becomes a status here, and nowhere else.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from engine import logs
from grpc_service.access import access_log, policy
from grpc_service.access.decoding import Decoding
from grpc_service.access.rpc_record import Rpc
from grpc_service.rpc.methods import Dispatcher
from grpc_service.rpc.status import StatusCode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping

    from grpc_service.access.keys import KeyRing
    from grpc_service.rpc.call import Call
    from grpc_service.rpc.methods import Method
    from grpc_service.rpc.status import Status

    Fields = Mapping[str, str | int | float]  # the fields of a log line
    Metadata = Iterable[tuple[str, str | bytes]]
    Record = Callable[[Fields, Metadata, str], None]

LIMITED = "triolet.v1.Inference/"  # the service whose calls count against a key's limits
# A draining server waits for calls of these methods until the engine has their requests.
SUBMITTING = (LIMITED, *policy.USES[1:])
# An Attach joins a request that the key's limits count already (`engine.requests.detached`).
COUNTED_ALREADY = {"triolet.v1.Inference/Attach"}


class Interceptor(Dispatcher):
    """Serves every call with one of ``methods``; a handler gets the request and its `Rpc`.

    Without ``keys``, calls need no key, and the keys that they send are ignored. ``status_of``
    returns the status for an error. ``record`` is called with the log's fields, the metadata and
    the id of each call to `policy.USES`. ``calls`` counts the calls that have ended, without those
    of reflection, by method and name of the status code; several interceptors may share it.
    ``decoding`` decodes the requests; all that comes to a server should share it.
    """

    def __init__(
        self,
        methods: Iterable[Method],
        keys: KeyRing | None,
        status_of: Callable[[Exception], Status],
        record: Record | None = None,
        calls: Counter[tuple[str, str]] | None = None,
        decoding: Decoding | None = None,
    ) -> None:
        super().__init__(methods, status_of)
        self._keys = keys
        self.record = record
        self.calls: Counter[tuple[str, str]] = Counter() if calls is None else calls
        self.decoding = Decoding() if decoding is None else decoding

    async def serve(self, call: Call) -> None:
        """Serve one call to its end, and log it. Raises nothing.

        Cancellation: this is how the call's client or its deadline ends it.
        """
        if not call.method.startswith(SUBMITTING):
            call.connection.note_taken(call)
        method = self.methods.get(call.method)
        call.record = rpc = Rpc.of(call)
        is_counted = method is not None and not _is_reflection(method)
        try:
            with self._accounting(rpc) if is_counted else contextlib.nullcontext():
                await super().serve(call)
        finally:
            # Otherwise call, record and request would be a cycle for the garbage collector.
            call.record = rpc.read_next = None

    @contextlib.contextmanager
    def _accounting(self, rpc: Rpc) -> Iterator[None]:
        """Count the call, and write its line of the access log, when it ends."""
        started_at = time.monotonic()
        call = rpc.call
        try:
            yield
        finally:
            rpc.leave_quota()
            # A call without a status was ended by its deadline or by its client.
            late = StatusCode.DEADLINE_EXCEEDED if call.is_late else StatusCode.CANCELLED
            code = (late if call.code is None else call.code).name
            self.calls[call.method, code] += 1
            fields = access_log.fields_of(rpc, code, time.monotonic() - started_at)
            access_log.write(rpc, fields)
            if self.record is not None and call.method.startswith(policy.USES):
                self.record(fields, call.metadata, rpc.logged_id)

    async def handle(self, method: Method, call: Call) -> Any:
        """Admit the call, read its request, and run the handler within the key's limits. The key's
        count of requests is lowered when the call has ended.

        Raises: as `policy.admit`, `Decoding.request_of` and the handler.
        Cancellation: the call's client or its deadline ends it, as in `serve`.
        """
        rpc: Rpc = call.record
        if _is_reflection(method):
            return await method.handler(None, rpc)
        connection = call.connection
        rpc.quota, rpc.is_operator = policy.admit(
            call.method, call.peer, call.metadata, self._keys, connection.certified
        )
        if method.takes_stream:
            rpc.read_next = partial(self.decoding.next_of, method, rpc)
        return await _begin(method, await self.decoding.request_of(method, rpc), rpc)


def _is_reflection(method: Method) -> bool:
    """Return whether a method is one of reflection, whose calls are neither limited nor logged."""
    return method.takes_stream and not method.name.startswith(LIMITED)


def _begin(method: Method, request: Any, rpc: Rpc) -> Awaitable[Any]:
    """Count the request against its key's limits, and return the handler's coroutine, which alone
    keeps a reference to the request."""
    rpc.request_id = getattr(request, "request_id", "") or uuid.uuid4().hex
    logs.request_id.set(logs.printable(rpc.request_id))
    method_name = rpc.method
    is_limited = method_name.startswith(LIMITED) and method_name not in COUNTED_ALREADY
    if is_limited:
        rpc.enter_quota()
    return method.handler(request, rpc)
