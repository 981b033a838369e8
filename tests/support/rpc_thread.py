"""An RPC server in a thread, for tests whose clients block."""

import contextlib
import threading

import trio

from grpc_service.rpc.server import RpcServer
from grpc_service.rpc.sockets import listen_tcp


@contextlib.contextmanager
def serving(serve_call, *, tls=None, limits=None):
    """Serve while the block runs; yield the port of a plain listener, and of one with ``tls``."""
    started, ready = [], threading.Event()

    async def main():
        listeners = listen_tcp("127.0.0.1", 0)
        if tls is not None:
            listeners += listen_tcp("127.0.0.1", 0, tls)
        scope = trio.CancelScope()
        started.append((trio.lowlevel.current_trio_token(), scope, listeners))
        ready.set()
        with scope:
            await RpcServer(serve_call, limits).run(listeners)

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    assert ready.wait(10)
    [(token, scope, listeners)] = started
    try:
        yield tuple(listener.port for listener in listeners)
    finally:
        token.run_sync_soon(scope.cancel)
        thread.join(10)
        assert not thread.is_alive()
