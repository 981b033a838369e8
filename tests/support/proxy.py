"""A TCP proxy whose connections a test can break as a network or a kernel would."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading


class Proxy:
    """Forward every connection to ``HOST:PORT``; ``address`` is where the proxy listens."""

    def __init__(self, target):
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._upstreams = []
        self._sockets = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._upstreams.append(server)
                self._sockets += [client, server]
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    @staticmethod
    def _forward(source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)

    def reset(self):
        """Send a TCP reset to the server on every connection."""
        for sock in self._upstreams:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(OSError):
                # close() alone would leave the closing to the thread that reads from the socket
                sock.shutdown(socket.SHUT_RD)
            sock.close()

    def close(self):
        """Close every connection and stop listening."""
        self._listener.close()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


@contextlib.contextmanager
def proxy(target):
    """Yield a `Proxy`; close it with all its connections at the end of the block."""
    one = Proxy(target)
    try:
        yield one
    finally:
        one.close()
