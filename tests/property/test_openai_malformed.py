"""A request whose rest is no HTTP gets one whole answer, whichever task is first to answer it."""

import socket
from types import SimpleNamespace

import anyio
import h11
import trio
from anycorn.app_wrappers import ASGIWrapper
from anycorn.worker_context import WorkerContext
from anyio.abc import SocketAttribute
from hypothesis import given
from hypothesis import strategies as st

from grpc_service.openai.connection import _Http1
from grpc_service.openai.server import _config_of
from grpc_service.rpc.limits import Limits

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
CONFIG = _config_of(SimpleNamespace(limits=Limits()))
WAITS = st.lists(st.integers(0, 4), min_size=12, max_size=12)


class _Stream:
    """A client that sends ``parts`` and leaves; each step takes some of the ``waits``."""

    def __init__(self, parts, waits):
        self._parts = list(parts)
        self._waits = list(waits)
        self.sent = b""
        self.is_closed = False

    def extra(self, attribute):
        if attribute is not SocketAttribute.raw_socket:
            raise anyio.TypedAttributeLookupError
        return SimpleNamespace(
            family=socket.AF_INET,
            getpeername=lambda: ("127.0.0.1", 1),
            getsockname=lambda: ("127.0.0.1", 2),
        )

    async def wait(self):
        for _ in range(self._waits.pop() if self._waits else 1):
            await trio.lowlevel.checkpoint()

    async def receive(self, max_bytes=0):
        await self.wait()
        if self.is_closed:
            raise anyio.ClosedResourceError
        if not self._parts:
            await trio.sleep(0.1)  # a client that waits for its answer
            raise anyio.EndOfStream
        return self._parts.pop(0)

    async def send(self, data):
        if self.is_closed:
            raise anyio.ClosedResourceError
        self.sent += data
        await self.wait()

    async def send_eof(self):
        pass

    async def aclose(self):
        self.is_closed = True


@given(
    first=st.lists(st.sampled_from([b"1\r\na\r\n", b"3\r\nabc\r\n"]), max_size=2).map(b"".join),
    cut=st.integers(0, 60),
    waits=WAITS,
    app_waits=WAITS,
    size=st.integers(0, 300),
)
def test_a_malformed_rest_never_cuts_or_mixes_an_answer(first, cut, waits, app_waits, size):
    """The request's own early answer, or the refusal of what is no HTTP, is whole."""
    data = HEAD + first + b"zz\r\n"
    stream = _Stream([data[:cut], data[cut:]] if cut else [data], waits)

    async def app(scope, receive, send):
        pauses = list(app_waits)

        async def put(message):
            for _ in range(pauses.pop()):
                await trio.lowlevel.checkpoint()
            await send(message)

        headers = [(b"content-length", b"%d" % size), (b"connection", b"close")]
        await put({"type": "http.response.start", "status": 415, "headers": headers})
        await put({"type": "http.response.body", "body": b"b" * size, "more_body": True})
        while (message := await receive())["type"] != "http.disconnect":
            if not message.get("more_body", False):
                break
        await put({"type": "http.response.body", "body": b"", "more_body": False})

    async def main():
        server = _Http1(ASGIWrapper(app), CONFIG, WorkerContext(None), {}, stream)
        with trio.fail_after(5):
            await server.run()

    trio.run(main)
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="POST", target="/", headers=[("host", "a")]))
    client.send(h11.EndOfMessage())
    client.receive_data(stream.sent)
    client.receive_data(b"")
    answer, body = client.next_event(), b""
    while isinstance(event := client.next_event(), h11.Data):
        body += bytes(event.data)
    assert isinstance(event, h11.EndOfMessage)
    assert stream.is_closed
    assert (answer.status_code, body) == (415, b"b" * size) or (
        answer.status_code == 400 and b"no request of HTTP" in body
    )
