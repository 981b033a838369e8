"""A server in memory that records its calls, and handlers for it."""

from contextlib import asynccontextmanager

import trio

from grpc_service.rpc.connection import Flusher
from grpc_service.rpc.errors import Disconnected
from grpc_service.rpc.server import RpcServer
from grpc_service.rpc.status import StatusCode
from tests.support.rpc_memory import PEER, Client, Wire, WireListener

MINUTE = 60.0
GOAWAY = b"\0\0\x08\x07\0\0\0\0\0" + bytes(8)


class MemoryServer:
    """A server whose clients connect in memory."""

    def __init__(self, serve_call, limits=None):
        self.flusher = Flusher()
        self.server = RpcServer(serve_call, limits, self.flusher)
        self.listener = WireListener()
        self.has_ended = False

    async def run(self):
        """Serve until stopped."""
        await self.server.run([self.listener])
        self.has_ended = True

    async def connect(self, *, window=65_535, is_deaf=False, peer=PEER):
        """Connect a client from the address ``peer``."""
        client = Client(Wire(peer), window=window, is_deaf=is_deaf)
        self.listener.arrive(client.wire)
        await client.settle()
        return client


class Server(MemoryServer):
    """A server whose calls are served by ``handler``.

    ``calls`` are the calls that it served, ``cancelled`` those whose handlers were cancelled.
    """

    def __init__(self, handler, limits=None):
        super().__init__(self._serve, limits)
        self.handler = handler
        self.calls = []
        self.cancelled = []
        self.num_running = 0

    @property
    def connections(self):
        """Return the open connections."""
        return self.server.connections

    async def _serve(self, call):
        self.calls.append(call)
        self.num_running += 1
        try:
            await self.handler(call)
        except trio.Cancelled:
            self.cancelled.append(call)
            raise
        except Disconnected:
            pass
        finally:
            self.num_running -= 1

    def check_idle(self):
        """Check that no state of any call is left."""
        assert self.num_running == 0
        for connection in self.connections:
            assert connection._calls.num_running == 0
            assert not [one for one in connection._nursery.child_tasks if "_serve" in one.name]
            assert connection.is_quiet
            assert not connection.http2.blocked_by_connection
            assert not connection.http2.blocked_by_stream
            assert not connection.http2.h2.streams
        start_limiter = self.server.shared.start_limiter
        assert start_limiter._num_passed == len(start_limiter._waiting) == 0


@asynccontextmanager
async def serving(handler, limits=None, kind=Server):
    """Yield a server that serves while the block runs."""
    server = kind(handler, limits)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        yield server
        nursery.cancel_scope.cancel()


async def echo(call):
    """Send every message back."""
    while (data := await call.read()) is not None:
        await call.write(data)
    await call.end(StatusCode.OK)


async def wait(call):
    """Serve for ever. Cancellation: ends the call."""
    await trio.sleep_forever()
