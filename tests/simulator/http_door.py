"""The HTTP port of a simulated world: the real `Door`, before simulated connections.

The body of a request is a number, which stands for the engine's request, and an answer has the
events themselves, as codecs have tests of their own. All else is the product's: admission, what is
written when, and how an answer ends.
"""

import json
from collections import Counter, deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import trio

from engine.api.engine import Engine
from engine.config import EngineConfig
from engine.core.common.events import Finished
from engine.core.common.prompts import PromptProgress
from engine.errors import EngineBug
from engine.requests.image_generation.values import DrawingFinished, DrawRequest
from engine.requests.stream import RequestStream
from engine.requests.text.values import GenerateRequest
from grpc_service.access.unread_calls import UnreadCalls
from grpc_service.openai.connection import HttpConnection
from grpc_service.openai.door import Access, Answers, Door, Route
from grpc_service.openai.work import Context, WholeEncoder, Work
from grpc_service.rpc.connection import Shared
from grpc_service.rpc.errors import Disconnected
from grpc_service.rpc.server import RpcServer
from grpc_service.services.backend import Backend
from grpc_service.services.call_writer import CallWriter
from tests.simulator.readers import Reader, SimulatedCall, SimulatedConnection, TextReader
from tests.simulator.watch import Violation

PATH = "/v1/simulated"
HEADERS = [(b"host", b"localhost"), (b"content-type", b"application/json")]


class EventStream(WholeEncoder):
    """An encoder whose answer is a stream of events, each in a list of its own."""

    def encode(self, source: int, events: Sequence[Any]) -> list[Any]:
        """Return the parts for events that are ready together."""
        return [[event] for event in events]

    def encode_short(self, source: int, event: Any) -> Any:
        """Return the part of one event."""
        return [event]


class WholeAnswer(WholeEncoder):
    """An encoder whose answer is sent when ``num_ends`` choices have ended."""

    def __init__(self, num_ends: int) -> None:
        self._num_left = num_ends
        self._kept: list[Any] = []

    def encode(self, source: int, events: Sequence[Any]) -> list[Any]:
        """Keep events; after the last one, return all. (The real door refuses progress here.)"""
        self._kept += [one for one in events if not isinstance(one, PromptProgress)]
        self._num_left -= sum(isinstance(one, Finished | DrawingFinished) for one in events)
        return [] if self._num_left else [self._kept]


class LeavingCall(SimulatedCall):
    """A call whose client leaves by closing its connection."""

    def leave(self) -> None:
        """Close the connection."""
        cast("HttpClient", self.connection).leave()


class HttpClient(SimulatedConnection):
    """A client with one request on a connection. It is also the stream of the connection, whose
    bytes wait in the server until the client takes them. ``may_fail``: writes have drawn bugs."""

    connection: "ClientConnection"  # set when the request is on its way

    def __init__(
        self,
        number: int,
        reader: Reader,
        unread_calls: UnreadCalls,
        is_window_closed: Callable[[], bool],
        most_unread: int,
        *,
        may_fail: bool,
    ) -> None:
        super().__init__(is_being_read=False, most_unread=most_unread)
        self.number = number
        self.reader = reader
        self.may_fail = may_fail
        self.call = LeavingCall(self, reader, unread_calls, is_window_closed)
        self.has_begun = trio.Event()  # the engine has the request
        self.has_ended = trio.Event()
        self.is_broken = self.has_left = False
        self.violation: Violation | None = None
        self._has_asked = False
        self._leaving = trio.Event()
        self._scope = trio.CancelScope()
        self._unsent: deque[Any] = deque()
        if self.is_whole and isinstance(reader, TextReader):
            reader.num_clients = 0  # an answer that is sent whole has no progress

    @property
    def request(self) -> Any:
        """The engine's request."""
        return self.reader.client.request

    @property
    def is_whole(self) -> bool:
        """Whether the answer is sent whole. That takes every event from the engine, so that clients
        of drawings who stop reading have none of these; nor have continued streams."""
        client, request = self.reader.client, self.request
        if client.cuts is not None or getattr(request, "continuation", None) is not None:
            return False
        if isinstance(request, DrawRequest) and client.stall_after is not None:
            return False
        return not hasattr(request, "expected") and self.number % 2 == 0

    def encoder(self) -> WholeEncoder:
        """Return a new encoder for the answer."""
        if not self.is_whole:
            return EventStream()
        return WholeAnswer(self.request.n or 1 if isinstance(self.request, GenerateRequest) else 1)

    async def serve(self, door: Door) -> None:
        """Make the request, and return when the server has done with it.

        Raises Violation. Cancellation: the server is cut.
        """
        number = b"%d" % self.number
        scope = {
            **{"type": "http", "method": "POST", "path": PATH, "query_string": b""},
            "headers": [*HEADERS, (b"x-request-id", b"http-" + number)],
        }
        try:
            with self._scope:
                await door(scope, self.receive, self.send, self.connection)
        finally:
            self.reader.has_left |= not self.has_ended.is_set()
            self.has_ended.set()
        self.call.check()
        if self.violation is not None:
            raise self.violation
        if not self.has_begun.is_set():
            raise Violation(f"{self.request.request_id} did not reach the engine")

    def leave(self) -> None:
        """Close the connection from the client's side."""
        self.has_left = self.reader.has_left = True
        self._leaving.set()

    # ---- ASGI

    async def receive(self) -> dict[str, Any]:
        """Return the request, and then the client's end. Cancellation: safe."""
        if not self._has_asked:
            self._has_asked = True
            return {"type": "http.request", "body": b'{"number": %d}' % self.number}
        await self._leaving.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        """Take a part of the answer: events wait to be read, an error is read at once."""
        await trio.lowlevel.checkpoint()
        if message["type"] == "http.response.start":
            return
        body = message["body"]
        if not message["more_body"]:
            self.has_ended.set()
        elif isinstance(body, bytes):
            code = json.loads(body.removeprefix(b"data: "))["error"]["code"]
            if not self.has_begun.is_set():
                self.violation = Violation(f"{self.request} was refused by the door: {code}")
                return
            error = self.call.stream.error
            if self.may_fail and code == EngineBug.reason.lower():
                self.reader.has_left = True  # a drawn bug
            elif error is not None and code != error.reason.lower():
                self.violation = Violation(f"{self.call.stream}: {error!r} came over as {code}")
            await self.call.end()
        else:
            self._unsent.extend(body)

    # ---- the connection's stream

    @property
    def is_clear(self) -> bool:
        """Whether the client has taken everything."""
        return not self._unsent

    def resume(self, part_bytes: int = 0) -> None:
        """Do nothing: the request comes in one part."""

    async def wait_sent(self) -> None:
        """Wait until the client has taken everything. Raises Disconnected."""
        while self._unsent and not self.is_broken:
            self.call.is_part = self.is_whole and len(self._unsent) > 1
            await self.call.write(self._unsent[0])
            if self._unsent:
                self._unsent.popleft()
        if self.is_broken:
            raise Disconnected

    def write_now(self, part: Any) -> bool:
        """Have the client take a part in the delivery of a step, or return False."""
        return not (self._unsent or self.is_broken) and self.call.try_write(part[0])

    def cut(self) -> None:
        """End the connection from the server's side, and with it the call."""
        self.is_broken = self.reader.has_left = True
        self._unsent.clear()
        self._scope.cancel(reason="the connection is cut")


class ClientConnection(HttpConnection):
    """A client's connection as the door has it. Its output goes to the client itself."""

    def __init__(self, shared: Shared, client: HttpClient) -> None:
        transport = SimpleNamespace(limit_unsent=lambda num_bytes: None, certified="")
        super().__init__(shared, cast("Any", transport), "ipv4:127.0.0.1:5")
        self.stream = cast("Any", client)
        self._client = client

    @property
    def is_being_read(self) -> bool:
        """False: a client that waits does not read."""
        return False

    def cut(self) -> None:
        """End the connection."""
        self._client.cut()

    def go_on(self) -> None:
        """Do nothing: the request comes in one part."""

    def write_now(self, data: Any) -> bool:
        """Have the client take a part, or return False."""
        return self._client.write_now(data)


class Front:
    """The door of one engine, and its clients. ``on_submit`` is called with each writer. It is also
    the engine that the door knows, which never drains, so that the engine itself refuses."""

    is_draining = False

    def __init__(
        self,
        engine: Engine,
        unread_calls: UnreadCalls,
        on_submit: Callable[[CallWriter], None],
    ) -> None:
        self._engine = engine
        self._on_submit = on_submit
        self._clients: dict[int, HttpClient] = {}
        self._shared = RpcServer(cast("Any", None)).shared
        self.door = Door(
            Backend(cast("Any", self), unread_calls),
            self._shared,
            Access(None, frozenset(), is_local=False),
            cast("Answers", None),
            decoding=cast("Any", None),
            calls=Counter(),
            record=None,
            max_bytes=1000,
            max_image_bytes=0,
        )
        route = Route("POST", "triolet.v1.Inference/Generate", decode=self._decode)
        self.door._routes[PATH] = route

    @property
    def config(self) -> EngineConfig:
        """The engine's configuration."""
        return self._engine.config

    async def run(self) -> None:
        """Give turns to refusals that wait. Cancellation: safe."""
        await self._shared.overhead.run()

    def take(self, client: HttpClient) -> None:
        """Expect the request of a client."""
        client.connection = ClientConnection(self._shared, client)
        self._clients[client.number] = client

    def _decode(self, body: dict[str, Any], context: Context) -> Work:
        client = self._clients[body["number"]]
        is_stream = not client.is_whole
        return Work(context.request_id, (client.request,), client.encoder(), is_stream)

    def submit(self, request: Any, *, reader: CallWriter, **options: Any) -> RequestStream[Any]:
        """Submit a request to the engine, and tell its client."""
        [client] = [one for one in self._clients.values() if one.request is request]
        del self._clients[client.number]
        client.call.stream = self._engine.submit(request, reader=reader, **options)
        self._on_submit(reader)
        client.has_begun.set()
        return client.call.stream
