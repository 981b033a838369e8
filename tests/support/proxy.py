"""A TCP proxy whose connections a test can break as a network or a kernel would."""

import contextlib
import socket
import struct
import threading
from contextlib import closing


class Proxy:
    """Forward every connection to ``HOST:PORT``; ``address`` is where the proxy listens."""

    _buffer_bytes = None  # of each socket; None: as the system has it

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
                server = socket.socket()
                if self._buffer_bytes:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._buffer_bytes)
                    server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._buffer_bytes)
                server.connect(self._target)
                self._upstreams.append(server)
                self._sockets += [client, server]
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        with contextlib.suppress(OSError):  # the source has ended, or was reset
            sink.shutdown(socket.SHUT_WR)

    def reset(self):
        """Send a TCP reset to the server on every connection."""
        for sock in self._upstreams:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(OSError):
                # after close() alone, the thread that reads would keep the socket open
                sock.shutdown(socket.SHUT_RD)
            sock.close()

    def cut(self):
        """Close every connection; new ones are forwarded as before."""
        cut, self._sockets, self._upstreams = self._sockets, [], []
        for sock in cut:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def close(self):
        """Close every connection and stop listening."""
        self._listener.close()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


class SmallProxy(Proxy):
    """A proxy with small buffers, so that a server soon notices that a client does not read."""

    _buffer_bytes = 4096


class HoldingProxy(Proxy):
    """A proxy, without TLS, that can hold back what the server sends after some messages."""

    def __init__(self, target):
        self._num_passing = None  # messages of the server that pass; None: all
        super().__init__(target)

    def hold_after(self, count):
        """Let ``count`` more of the server's messages pass, and nothing after them."""
        self._num_passing = count

    def _forward(self, source, sink):
        if source in self._upstreams:
            self._forward_frames(source, sink)
        else:
            super()._forward(source, sink)

    def _forward_frames(self, server, client):
        """Forward what the server sends, frame by frame, up to the last message that may pass.
        A frame has its length in three bytes, its kind in one, and five more before its body."""
        rest = b""
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                rest += data
                passing, is_last = 0, False
                while len(rest) - passing >= 9 and not is_last:
                    size = 9 + int.from_bytes(rest[passing : passing + 3], "big")
                    if len(rest) - passing < size:
                        break
                    is_data = rest[passing + 3] == 0
                    passing += size
                    if is_data and self._num_passing is not None:
                        self._num_passing -= 1
                        is_last = not self._num_passing
                client.sendall(rest[:passing])
                rest = rest[passing:]
                if is_last:
                    self._num_passing = None
                    return


@contextlib.contextmanager
def proxy(target, make=Proxy):
    """Yield a `Proxy`; close it with all its connections at the end of the block."""
    with closing(make(target)) as one:
        yield one
